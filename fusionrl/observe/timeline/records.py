"""The timeline's files of a run, read: spans of all processes on one clock, in microseconds since the run began.

The clock is the driver's. A process of its machine (one boot) shares it. Each time of a process elsewhere is shifted by
the offset of then, between those that the driver measured before and after; without any, by the wall clocks of both.
`steps_of` says which sample was trained in which step.
"""

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import orjson

from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.spans import FOLDER

_NAME = re.compile(r"(?P<process>.+)\.a(?P<attempt>\d+)\.jsonl")
DRIVER, BUFFER = "driver", "buffer"
Facts = dict[str, object]


@dataclass
class Span:
    """A span of a process."""

    process: str
    lane: str
    name: str
    start: int
    end: int
    facts: Facts = field(default_factory=dict)
    is_open: bool = False  # it had not ended when the record did; it ends there

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass
class SampleCourse:
    process: str
    start: int
    end: int
    facts: Facts
    parts: list[Span]


@dataclass
class Counter:
    process: str
    name: str
    time: int
    values: dict[str, float]


@dataclass
class Machine:
    """A process's machine."""

    host: str
    error_us: float | None  # the most by which its times may be wrong; None: not measured
    utc_offset_s: int  # of the local time, in which its logs are
    wall_start_ns: int  # what its wall clock said when the attempt began


@dataclass
class RunRecord:
    """The record of one attempt of a run. `wall_ns`: when it began, of the driver's wall clock."""

    attempt: int
    wall_ns: int
    spans: list[Span] = field(default_factory=list)
    courses: list[SampleCourse] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    _ordered: dict[tuple[str, tuple[str, ...]], list[Span]] = field(default_factory=dict, repr=False)
    _latest_ends: dict[tuple[str, tuple[str, ...]], list[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[Span]]:
        by_name: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            by_name[span.process, span.name].append(span)
        return by_name

    @property
    def end(self) -> int:
        return max([0, *(item.end for item in self.spans), *(item.end for item in self.courses)])

    def of(self, process: str, *names: str) -> list[Span]:
        """Return the spans of a process with these names, in order; sorted once, as a long run needs them each step."""
        key = (process, names)
        if key not in self._ordered:
            spans = [span for name in names for span in self._by_name.get((process, name), ())]
            self._ordered[key] = sorted(spans, key=lambda span: span.start)
        return self._ordered[key]

    def between(self, start: int, end: int, process: str, *names: str) -> list[Span]:
        """Return those of these spans that begin before `end`, from the first that ends after `start` on."""
        spans, key = self.of(process, *names), (process, names)
        if key not in self._latest_ends:
            self._latest_ends[key] = list(itertools.accumulate((span.end for span in spans), max))
        first = bisect.bisect_right(self._latest_ends[key], start)
        return spans[first : bisect.bisect_left(spans, end, key=lambda span: span.start)]

    def processes(self, prefix: str = "") -> list[str]:
        """Return the names of the processes that begin so, in order of their numbers."""
        return sorted((name for name in self.machines if name.startswith(prefix)), key=_natural)


def attempts(run: Path) -> list[int]:
    """Return the attempts of a run that have a record; ValueError if none has."""
    if numbers := sorted(_files(run)):
        return numbers
    raise ValueError(
        f"{run} has no {FOLDER}/ with records: its run has not started, it is not a run folder, or an older version of"
        " fusionrl made it"
    )


def read_attempt(run: Path, attempt: int) -> RunRecord:
    """Read the record of one attempt; ValueError if the driver has none."""
    files = _files(run).get(attempt, {})
    if DRIVER not in files:
        raise ValueError(f"{run}/{FOLDER} has no record of the driver for attempt {attempt}: the file is gone")
    lines = {process: list(_lines(path)) for process, path in files.items()}
    clock = _DriverClock(lines[DRIVER])
    recorded = RunRecord(attempt, clock.wall_ns)
    for process in sorted(files, key=_natural):
        _read_process(process, lines[process], clock, recorded)
    last = recorded.end
    for span in recorded.spans:
        if span.is_open:
            span.end = max(span.start, last)
    return recorded


def _files(run: Path) -> dict[int, dict[str, Path]]:
    """Return attempt → process → its file."""
    files: dict[int, dict[str, Path]] = defaultdict(dict)
    folder = run / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            files[int(match["attempt"])][match["process"]] = path
    return files


def _lines(path: Path) -> Iterator[list[object] | dict[str, object]]:
    """The records of a file; a line that cannot be read, as of a process that was killed, is passed over."""
    for line in path.read_bytes().splitlines():
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, list | dict) and record:
            yield record


def _placing(start_ns: int, readings: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """Return the function that moves µs in a process's record to the driver's clock, since the run began.

    readings  (time by the process's clock, its clock minus the driver's, ns): between two of them it drifts evenly
    """
    times = [time for time, _ in readings]

    def place(micros: int) -> int:
        at = start_ns + micros * 1000
        after = bisect.bisect(times, at)
        (left, offset), (right, next_offset) = readings[max(0, after - 1)], readings[min(after, len(readings) - 1)]
        share = (at - left) / (right - left) if left < at < right else 0.0
        return (at - offset - round(share * (next_offset - offset))) // 1000

    return place


class _DriverClock:
    def __init__(self, lines: list[list[object] | dict[str, object]]) -> None:
        header = next((line for line in lines if isinstance(line, dict)), None)
        if header is None:
            raise ValueError("the driver's record has no first line: the disk was full when the run began")
        self.wall_ns, self._mono_ns = _int(header["wall_ns"]), _int(header["mono_ns"])
        self._boot = str(header["boot"])
        self._measured: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # boot → (time, offset, error), ns
        for line in lines:
            if isinstance(line, list) and line[0] == "K":
                boot, micros, offset, error = str(line[1]), *map(_int, line[2:5])
                at = self._mono_ns + micros * 1000 + offset
                self._measured[boot].append((at, offset + self._mono_ns, error))

    def of(self, header: dict[str, object]) -> tuple[Callable[[int], int], float | None]:
        """Return the function that places a process's times, and the most µs by which it is wrong; None: unknown."""
        boot, mono_ns = str(header["boot"]), _int(header["mono_ns"])
        if boot == self._boot:
            return _placing(mono_ns, [(mono_ns, self._mono_ns)]), 0.0
        if known := sorted(self._measured.get(boot, ())):
            return _placing(mono_ns, [reading[:2] for reading in known]), max(error for *_, error in known) / 1000
        begun = _int(header["wall_ns"]) - self.wall_ns
        return _placing(mono_ns, [(mono_ns, mono_ns - begun)]), None


def _read_process(
    process: str, lines: list[list[object] | dict[str, object]], clock: _DriverClock, into: RunRecord
) -> None:
    begun = dict[tuple[str, str, int], Span]()
    place: Callable[[int], int] = int  # a file that lost its first line
    for line in lines:
        if process == DRIVER and isinstance(line, list) and (owner := _owner(line)) != DRIVER:
            into.machines.setdefault(owner, into.machines[DRIVER])
        else:
            owner = process
        if isinstance(line, dict):
            place, error = clock.of(line)
            wall_start_ns = _int(line["wall_ns"]) - place(0) * 1000
            into.machines[process] = Machine(str(line["host"]), error, _int(line.get("utc_offset_s", 0)), wall_start_ns)
            into.spans += begun.values()
            begun = {}
        elif line[0] == "B":
            lane, name, start = str(line[1]), str(line[2]), _int(line[3])
            at = place(start)
            begun[lane, name, start] = Span(owner, lane, name, at, at, _facts(line[4]), is_open=True)
        elif line[0] == "X":
            lane, name, start, duration = str(line[1]), str(line[2]), _int(line[3]), _int(line[4])
            begun.pop((lane, name, start), None)
            into.spans.append(Span(owner, lane, name, place(start), place(start + duration), _facts(line[5])))
        elif line[0] == "C":
            values = {name: float(value) for name, value in _facts(line[3]).items() if isinstance(value, int | float)}
            into.counters.append(Counter(process, str(line[1]), place(_int(line[2])), values))
        elif line[0] == "S":
            into.courses.append(_course(process, line, place))
    into.spans += begun.values()


def _owner(line: list[object]) -> str:
    """The process that a span of the driver's would be of, under --in-process, by the thread that it ran in."""
    lane = str(line[1]) if line[0] in ("B", "X") else ""
    if lane in _LANES:
        return _LANES[lane]
    match = _ACTOR_THREAD.fullmatch(lane)
    if match is None:
        return DRIVER
    return f"engine-actor-{match['engine']}" if match["engine"] else "trainer-0" if match["trainer"] else BUFFER


_ACTOR_THREAD = re.compile(r"(?:(?P<trainer>trainer)|buffer|engine (?P<engine>\d+))-(?:\d+|loop)")
_LANES = {"megatron": "trainer-0", "send": "trainer-0"}
_LANES |= dict.fromkeys(("rollouts", "stages", "evaluations", "rewards"), BUFFER)


def _course(process: str, line: list[object], place: Callable[[int], int]) -> SampleCourse:
    start, duration, facts, raw_parts = _int(line[1]), _int(line[2]), _facts(line[3]), line[4]
    parts = []
    for part in raw_parts if isinstance(raw_parts, list) else ():
        at, end = place(_int(part[1])), place(_int(part[1]) + _int(part[2]))
        parts.append(Span(process, "", str(part[0]), at, end, _facts(part[3])))
    return SampleCourse(process, place(start), place(start + duration), facts, parts)


def _facts(value: object) -> Facts:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int:
    assert isinstance(value, int), f"{value!r} is not an integer: another version wrote the timeline's file"
    return value


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which trainer-10 comes after trainer-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# ------------------------------------------------------------------------------------------------ samples of a step
_INDEX = re.compile(rb'"index":(\d+)')
_HEAD_BYTES = 400  # of a row: its index is at its beginning


def steps_of(run: Path, recorded: RunRecord) -> dict[int, list[SampleCourse]]:
    """Return step → the courses of its samples, by `rollouts/`; of a step without a file, those that ended in it.

    Samples that no step trained are under 0: of evaluations, dropped, or under way at the end.
    """
    step_of_index = _indices(run, recorded.attempt)
    rollouts = recorded.of("buffer", "rollout")
    known_from = recorded.end + 1
    if step_of_index:  # files of earlier steps may be gone (--keep-rollouts)
        first = min(step_of_index.values())
        known_from = next((rollout.start for rollout in rollouts if rollout.facts.get("step") == first), 0)
    courses_by_step: dict[int, list[SampleCourse]] = defaultdict(list)
    for course in recorded.courses:
        if course.facts.get("evaluation"):
            courses_by_step[0].append(course)
            continue
        index = course.facts.get("index")
        step: object = step_of_index.get(index) if isinstance(index, int) else None
        if step is None and course.end < known_from:
            around = recorded.between(course.end - 1, course.end + 1, "buffer", "rollout")
            step = next((rollout.facts.get("step") for rollout in around if rollout.end >= course.end), None)
        courses_by_step[step if isinstance(step, int) else 0].append(course)
    return dict(courses_by_step)


def _indices(run: Path, attempt: int) -> dict[int, int]:
    """Index of a sample → the step that trained it."""
    steps: dict[int, int] = {}
    for rollout in list_rollouts(run, "train", all_attempts=True):
        if rollout.attempt == attempt:
            with rollout.path.open("rb") as file:
                matches = (_INDEX.search(line[:_HEAD_BYTES]) for line in file)
                steps |= {int(match[1]): rollout.step for match in matches if match}
    return steps


def detailed(part: Span) -> list[Span]:
    """Return a part, and for a turn whose engine told its times: the queue, the prefill and the decode in it."""

    def micros(fact: str) -> int:
        seconds = part.facts.get(fact)
        return int(1e6 * seconds) if isinstance(seconds, int | float) else 0

    first, took = micros("first_token_s"), min(micros("engine_s"), part.duration)
    if part.name != "turn" or not first or not took:
        return [part]
    start = part.end - took
    edges = (start, start + min(micros("queue_s"), first), start + first, part.end)
    named = zip(("queue", "prefill", "decode"), itertools.pairwise(edges), strict=True)
    inner = [Span(part.process, part.lane, name, begin, min(end, part.end)) for name, (begin, end) in named]
    return [part, *(span for span in inner if span.end > span.start)]


def first_token(part: Span) -> int:
    """Return when a turn's first token came, as well as it is known: not before this."""
    return next((span.start for span in detailed(part) if span.name == "decode"), part.start)
