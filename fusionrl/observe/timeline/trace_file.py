"""The file of a timeline: the Trace Event Format (JSON), which ui.perfetto.dev and chrome://tracing open."""

import gzip
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import orjson

from fusionrl.observe.timeline.records import (
    BUFFER,
    DRIVER,
    Facts,
    RunRecord,
    SampleCourse,
    Span,
    detailed,
    first_token,
)

Event = dict[str, object]
T = TypeVar("T", Span, SampleCourse)
SAMPLES = "samples"
_UNFINISHED = ("aborted", "failed")
Flow = list[tuple[Span, int]]  # an arrow: spans, each with the time within it at which the arrow passes


@dataclass
class Trace:
    """Events in the making; processes and tracks get numbers as they come."""

    events: list[Event] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    tids: dict[tuple[int, str], int] = field(default_factory=dict)
    place_of: dict[int, tuple[int, int]] = field(default_factory=dict)  # id of a span → (pid, tid)

    def pid(self, process: str) -> int:
        if process not in self.pids:
            number = self.pids[process] = len(self.pids) + 1
            self._meta("process_name", number, 0, name=process)
            self._meta("process_sort_index", number, 0, sort_index=number)
        return self.pids[process]

    def tid(self, pid: int, track: str) -> int:
        if (pid, track) not in self.tids:
            number = self.tids[pid, track] = len(self.tids) + 1
            self._meta("thread_name", pid, number, name=track)
            self._meta("thread_sort_index", pid, number, sort_index=number)
        return self.tids[pid, track]

    def _meta(self, kind: str, pid: int, tid: int, **args: object) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def span(self, span: Span, pid: int, tid: int) -> None:
        args = dict(span.facts) | ({"not ended": True} if span.is_open else {})
        self.place_of[id(span)] = pid, tid
        event: Event = {"ph": "X", "name": span.name, "cat": span.process, "pid": pid, "tid": tid}
        self.events.append(event | {"ts": span.start, "dur": span.duration, "args": args})

    def counter(self, process: str, name: str, time: int, values: Mapping[str, float]) -> None:
        pid = self.pid(process)
        self.events.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time, "args": dict(values)})

    def flow(self, number: int, flow: Flow) -> None:
        """Add an arrow, if all its spans are in the file."""
        times = [time for _, time in flow]
        if len(flow) < 2 or any(id(span) not in self.place_of for span, _ in flow) or times != sorted(times):
            return  # clocks of two machines may differ a little
        for at, (span, time) in enumerate(flow):
            pid, tid = self.place_of[id(span)]
            event: Event = {"ph": "s" if at == 0 else "f" if at == len(flow) - 1 else "t", "id": number, "name": "data"}
            event |= {"cat": "flow", "pid": pid, "tid": tid, "ts": time}
            self.events.append(event | ({"bp": "e"} if at else {}))


def build(
    run: Path,
    recorded: RunRecord,
    by_step: Mapping[int, Sequence[SampleCourse]],
    steps: range | None = None,
    num_samples: int = 64,
) -> Trace:
    """Make the events of an attempt, with the longest samples of each step, and all that were aborted or failed."""
    trace, window = Trace(), (-(1 << 60), 1 << 60)
    if steps is not None:
        spans = [span for span in recorded.of(DRIVER, "step") if span.facts.get("step") in steps]
        if not spans:
            named = f"--steps {steps.start}-{steps.stop - 1}"
            raise ValueError(f"{named}: the record of attempt {recorded.attempt} has none")
        window = spans[0].start, spans[-1].end
    for process in (DRIVER, BUFFER):
        trace.pid(process)
    for process in recorded.processes():
        lanes: dict[str, list[Span]] = defaultdict(list)
        for span in recorded.spans:
            if span.process == process and _overlaps(span, window):
                lanes[span.lane if span.lane in OWN_TRACKS else "main"].append(span)
        pid = trace.pid(process)
        for lane in sorted(lanes, key=lambda lane: (lane != "main", lane)):
            _add_tracks(trace, pid, lane, lanes[lane])
    for process, rank, path in trace_files(run, recorded.attempt, steps):
        for thread, spans in read_trace(path, process, recorded).items():
            _add_tracks(trace, trace.pid(process), " ".join(filter(None, ("torch", rank, thread))), spans)
    courses_by_step = chosen_samples(by_step, steps, num_samples)
    if any(courses_by_step.values()):
        _add_samples(trace, courses_by_step)
    for counter in recorded.counters:
        if window[0] <= counter.time <= window[1]:
            trace.counter(counter.process, counter.name, counter.time, counter.values)
    _add_loads(trace, run, recorded, window)
    _add_in_flight(trace, recorded, window)
    for number, flow in enumerate(flows(recorded, courses_by_step), start=1):
        trace.flow(number, flow)
    return trace


def write(trace: Sequence[Event], path: Path, wall_ns: int) -> int:
    """Write the file; returns its bytes. `wall_ns`: the wall clock at time 0."""
    head = {"displayTimeUnit": "ms", "otherData": {"wall_clock_at_0_ns": str(wall_ns)}}
    return path.write_bytes(orjson.dumps(head | {"traceEvents": trace}, default=str))


def chosen_samples(
    by_step: Mapping[int, Sequence[SampleCourse]], steps: range | None, count: int
) -> dict[int, list[SampleCourse]]:
    """Return step → its `count` longest samples, all that were not finished, and the first ones of new weights."""
    everyone = itertools.chain.from_iterable(by_step.values())
    first = {id(course) for _, course in first_turns(everyone).values()} if count else set()
    chosen: dict[int, list[SampleCourse]] = {}
    for step, courses in by_step.items():
        if steps is not None and step not in steps:
            continue
        longest = sorted(courses, key=lambda course: course.start - course.end)
        rest = longest[count:]
        remaining = [sample for sample in rest if sample.facts.get("status") in _UNFINISHED or id(sample) in first]
        chosen[step] = sorted([*longest[:count], *remaining], key=lambda course: course.start)
    return chosen


def _overlaps(span: Span, window: tuple[int, int]) -> bool:
    return span.end >= window[0] and span.start <= window[1]


def _add_tracks(trace: Trace, pid: int, name: str, spans: Iterable[Span]) -> None:
    """Add spans on as few tracks as it takes: `name`, `name 2`, …"""
    for number, placed in enumerate(divide(spans), start=1):
        tid = trace.tid(pid, name if number == 1 else f"{name} {number}")
        for span in placed:
            trace.span(span, pid, tid)


def _add_samples(trace: Trace, courses_by_step: Mapping[int, Sequence[SampleCourse]]) -> None:
    """Samples on as few tracks as it takes; each with its parts in it."""
    pid = trace.pid(SAMPLES)
    step_of = {id(course): step for step, courses in courses_by_step.items() for course in courses}
    everyone = [course for courses in courses_by_step.values() for course in courses]
    beside: list[Span] = []  # what a sample does at the same time as something else
    for number, placed in enumerate(divide(everyone, may_nest=False)):
        tid = trace.tid(pid, f"samples {number + 1}")
        for course in placed:
            name = f"{'evaluation, ' if course.facts.get('evaluation') else ''}sample {course.facts.get('index', '?')}"
            facts = {"step": step_of[id(course)]} | course.facts
            trace.span(Span(SAMPLES, "", name, course.start, course.end, facts), pid, tid)
            main_lane, *further_lanes = divide(course.parts) or [[]]
            beside += itertools.chain.from_iterable(further_lanes)
            for part in main_lane:
                for span in detailed(part):
                    trace.span(span, pid, tid)
    _add_tracks(trace, pid, "beside", beside)


def _add_loads(trace: Trace, run: Path, recorded: RunRecord, window: tuple[int, int]) -> None:
    low, high = max(window[0], 0), min(window[1], recorded.end)
    for process in recorded.processes("engine-actor-"):
        number = process.removeprefix("engine-actor-")
        path = run / "logs" / f"engine-{number}.log"
        if not path.is_file():
            continue
        machine = recorded.machines[process]
        for rank, micros, values in read_load(path, machine.utc_offset_s):
            time = micros - machine.wall_start_ns // 1000
            if low <= time <= high:
                for name, value in values.items():
                    trace.counter(process, f"{rank} {name}".strip(), time, {name: value})


def _add_in_flight(trace: Trace, recorded: RunRecord, window: tuple[int, int]) -> None:
    """Curves of the samples that are at an engine, at a tool, and being scored."""
    names = {"turn": "at engines", "tool": "at tools", "reward": "being scored"}
    changes: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for part in itertools.chain.from_iterable(course.parts for course in recorded.courses):
        if part.name in changes and _overlaps(part, window):
            changes[part.name] += [(part.start, 1), (part.end, -1)]
    for name, steps in changes.items():
        total = 0
        for time, group in itertools.groupby(sorted(steps), key=lambda change: change[0]):
            total += sum(change for _, change in group)
            trace.counter(SAMPLES, names[name], time, {"samples": total})


def flows(recorded: RunRecord, courses_by_step: Mapping[int, Sequence[SampleCourse]]) -> list[Flow]:
    """Return the arrows: sample → its shard → each trainer's step → its part of the push → the first token of the new
    weights. `courses_by_step` are the samples in the file."""
    arrows: list[Flow] = []
    cuts = {span.facts.get("step"): span for span in recorded.of(BUFFER, "cut")}
    trainers = list(recorded.processes("trainer-"))
    trains = {(name, span.facts.get("step")): span for name in trainers for span in recorded.of(name, "train")}
    pushes = {name: recorded.of(name, "push") for name in trainers}
    firsts = first_turns(itertools.chain.from_iterable(courses_by_step.values()))
    for step, cut in cuts.items():
        if not isinstance(step, int):
            continue
        for course in courses_by_step.get(step, ()):
            if course.parts and course.parts[-1].end <= cut.end:
                last = course.parts[-1]
                arrows.append([(last, last.end), (cut, max(cut.start, last.end))])
        for name in trainers:
            train = trains.get((name, step))
            if train is None:
                continue
            flow = [(cut, cut.end), (train, train.start)]
            push = next((span for span in pushes[name] if _version(span) >= step and span.start >= train.end), None)
            if push is not None:
                flow.append((push, push.start))
                turn, _ = firsts.get(_version(push), (None, None))
                if turn is not None and turn.end > push.end:
                    flow.append((turn, max(turn.start, min(first_token(turn), turn.end))))
            arrows.append(flow)
    return arrows


def first_turns(courses: Iterable[SampleCourse]) -> dict[int, tuple[Span, SampleCourse]]:
    """Return version of the weights → the turn that had a token of it first, and its sample."""
    turns = [(turn, course) for course in courses for turn in course.parts if turn.name == "turn"]
    firsts: dict[int, tuple[Span, SampleCourse]] = {}
    for turn, course in sorted(turns, key=lambda item: first_token(item[0])):
        if _version(turn) >= 0:
            firsts.setdefault(_version(turn), (turn, course))
    return firsts


def _version(span: Span) -> int:
    version = span.facts.get("version")
    return version if isinstance(version, int) else -1


# Lanes with a track of their own; those of threads share the first tracks of their process.
OWN_TRACKS = ("rollouts", "stages", "evaluations", "rewards", "send")


def divide(spans: Iterable[T], may_nest: bool = True) -> list[list[T]]:
    """Divide spans over as few tracks as it takes one after the other; in each, in order of their starts."""
    tracks: list[tuple[list[T], list[int]]] = []  # spans, and the ends of those that are open
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for placed, open_ends in tracks:
            while open_ends and open_ends[-1] <= span.start:
                open_ends.pop()
            if not open_ends or (may_nest and span.end <= open_ends[-1]):
                placed.append(span)
                open_ends.append(span.end)
                break
        else:
            tracks.append(([span], [span.end]))
    return [placed for placed, _ in tracks]


_LINE = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{3}))?([^\]]*)\] (?:Decode|Prefill) batch([^\n]*)")
_LOADS = {
    "running": re.compile(rb"#running-req: (\d+)"),  # requests
    "queued": re.compile(rb"#queue-req: (\d+)"),
    "kv_used": re.compile(rb"token usage: ([\d.]+)"),  # share of the cache, 0 … 1
    "decoded_tokens_per_s": re.compile(rb"gen throughput \(token/s\): ([\d.]+)"),
    "prefilled_tokens_per_s": re.compile(rb"input throughput \(token/s\): ([\d.]+)"),
}


def read_load(path: Path, utc_offset_s: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (rank of the engine, "" where it has one, wall clock in µs, values by a name of `_LOADS`) of each line."""
    for second, millis, rank, text in _LINE.findall(path.read_bytes()):
        at = datetime.strptime(second.decode(), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        micros = int(at.timestamp() - utc_offset_s) * 1_000_000 + int(millis or 0) * 1000
        values = {name: float(match[1]) for name, pattern in _LOADS.items() if (match := pattern.search(text))}
        yield rank.decode().strip(), micros, values


# ------------------------------------------------------------------------------------------------ torch.profiler
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

    A trace's times come from the wall clock of its machine. The record of the same process has that clock and the
    monotonic one at its beginning, from which the timeline's times come.

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
