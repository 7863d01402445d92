"""Traces by torch.profiler (--profile-tool torch) as tracks of their process.

Their times come from its machine's wall clock; the record of the same process has that and the monotonic clock at its
beginning, from which the timeline's own times come.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import orjson

from fusionrl.observe.timeline.records import Facts, RunRecord, Span

FOLDER = "profiles"
# As torch names them for a trainer, and SGLang for each rank of an engine.
_NAME = re.compile(r"step_(?P<step>\d+)\.(?P<process>[a-z]+-\d+)\.a(?P<attempt>\d+)(?P<rank>-[\w-]+)?\.trace\.json\.gz")


def trace_files(run: Path, attempt: int, steps: range | None) -> Iterator[tuple[str, str, Path]]:
    """Yield (process of the timeline, rank within it, file) of each trace of an attempt; `steps`: None: all."""
    folder = run / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["attempt"]) != attempt or (steps is not None and int(match["step"]) not in steps):
            continue
        process = match["process"]
        process = process.replace("engine-", "engine-actor-") if process.startswith("engine-") else process
        yield process, (match["rank"] or "").removeprefix("-"), path


def read_trace(path: Path, process: str, recorded: RunRecord) -> dict[str, list[Span]]:
    """Return the name of a thread, or of a stream of a GPU, → its spans on the timeline's clock.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        document = orjson.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it, and the timeline is made without it") from error
    machine = recorded.machines.get(process)
    wall_start_ns = recorded.wall_ns if machine is None else machine.wall_start_ns
    base_ns = int(document.get("baseTimeNanoseconds", 0)) - wall_start_ns
    events = document.get("traceEvents", [])
    names = {
        (event.get("pid"), event.get("tid")): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") in _NO_WORK:
            continue
        start_ns, ns = base_ns + round(1000 * float(event["ts"])), round(1000 * float(event.get("dur", 0)))
        start, end = start_ns // 1000, (start_ns + ns) // 1000
        facts: Facts = {name: value for name, value in event.get("args", {}).items() if name in _FACTS}
        thread = names.get((event.get("pid"), event.get("tid")), f"thread {event.get('tid')}")
        spans[thread].append(Span(process, "", str(event["name"]), start, end, facts))
    return dict(spans)


_NO_WORK = ("Trace", "overhead")  # spans over the whole file
_FACTS = ("External id", "correlation", "stream", "device", "bytes", "grid", "block", "Input Dims")
