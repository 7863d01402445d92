"""The report of a timeline: shares of the time, idle pools, the slowest rank, and what each step is bound by."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fusionrl.base.wording import counted
from fusionrl.observe.timeline.records import BUFFER, DRIVER, RunRecord, SampleCourse, Span

OTHER = "other"
Intervals = list[tuple[int, int]]
_PUSH = ("prepare push", "push", "write weights")
_WORK = ("train", "score", "score ahead", "prepare", "values", "process rewards", "validate")


@dataclass(frozen=True)
class Pool:
    """The time of a pool of processes within the run's steps, in microseconds; it is idle for the rest of `total`."""

    name: str
    busy: float
    push: float
    total: float

    @property
    def idle(self) -> float:
        return self.total - self.busy - self.push


def driver_shares(recorded: RunRecord, start: int, end: int) -> dict[str, int]:
    """Return phase of the driver → its microseconds between two times; the values add up to `end - start`.

    Of phases within each other the innermost one counts, but for the parts of a push. `OTHER` is in no phase.
    """
    spans = [
        (max(phase.start, start), min(phase.end, end), phase.name)
        for phase in recorded.between(start, end, DRIVER, *_DRIVER_PHASES)
        if not phase.lane
    ]
    edges = sorted({start, end, *(edge for span in spans for edge in span[:2] if start < edge < end)})
    shares: dict[str, int] = {}
    spans.sort()
    active: list[tuple[int, int, str]] = []
    at = 0
    for begin, stop in itertools.pairwise(edges):
        while at < len(spans) and spans[at][0] <= begin:
            active.append(spans[at])
            at += 1
        active = [phase for phase in active if phase[1] > begin]
        name = max(active, key=lambda phase: (phase[0], -phase[1]))[2] if active else OTHER
        shares[name] = shares.get(name, 0) + stop - begin
    return shares


_DRIVER_PHASES = (
    *("import", "start", "restore", "generate", "fetch", "train", "columns", "measure", "make room", "resume stream"),
    *("record", "drain", "push", "evaluate", "validate", "wait for evaluation", "save", "publish checkpoint"),
    *("save hf", "profile", "end"),
)


def pools(recorded: RunRecord, start: int, end: int) -> list[Pool]:
    """Return the pools' shares between two times: engines, trainers (and those of a critic or prm), rewards."""
    window, rows = [(start, end)], []
    if engines := recorded.processes("engine-actor-"):
        paused = [_within(_pauses(recorded, name), window) for name in engines]
        push = sum(map(_total, paused)) / len(engines)
        turns = _parts(recorded.courses, "turn") or _intervals(recorded.of(BUFFER, "rollout", "evaluation"))
        busy = [_total(_without(_within(_union(turns), window), pause)) for pause in paused]
        # A turn does not say which engine had it: of several, this is when at least one had a request.
        name = "engines" if len(engines) == 1 else "engines (at least one busy)"
        rows.append(Pool(name, sum(busy) / len(engines), push, end - start))
    for role in ("trainer-", "critic-", "prm-"):
        if ranks := recorded.processes(role):
            pushes = [_within(_union(_intervals(recorded.of(rank, *_PUSH))), window) for rank in ranks]
            works = [_within(_union(_intervals(recorded.of(rank, *_WORK))), window) for rank in ranks]
            work = sum(_total(_without(compute, push)) for compute, push in zip(works, pushes, strict=True))
            rows.append(Pool(f"{role[:-1]}s", work / len(ranks), sum(map(_total, pushes)) / len(ranks), end - start))
    rewards = [*_parts(recorded.courses, "reward"), *_intervals(recorded.of(BUFFER, "reward"))]
    if rewards:
        rows.append(Pool("rewards", _total(_within(_union(rewards), window)), 0, end - start))
    return rows


def in_flight(courses: Iterable[SampleCourse], start: int, end: int) -> tuple[float, int]:
    """Return how many requests were at the engines between two times: in the mean of the busy time, and at most."""
    turns = [turn for turn in _parts(courses, "turn") if turn[1] > start and turn[0] < end]
    inside = [(max(turn[0], start), min(turn[1], end)) for turn in turns]
    busy = _total(_union(inside))
    changes = sorted([(turn[0], 1) for turn in inside] + [(turn[1], -1) for turn in inside])
    most = level = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return (sum(turn[1] - turn[0] for turn in inside) / busy if busy else 0.0), most


def compute_time(recorded: RunRecord, rank: str, start: int, end: int) -> int:
    """Return a rank's microseconds in forward and backward passes between two times: not in waits for other ranks."""
    spans = recorded.of(rank, "forward", "backward")
    first = bisect.bisect_left(spans, start, key=lambda span: span.start)
    last = bisect.bisect_right(spans, end, key=lambda span: span.start)
    return sum(span.duration for span in spans[first:last] if span.end <= end)


def _pauses(recorded: RunRecord, engine: str) -> Intervals:
    """From the beginning of a pause to the end of the resume that follows."""
    intervals, paused = [], None
    for span in recorded.of(engine, "pause", "resume"):
        if span.name == "pause" and paused is None:
            paused = span.start
        elif span.name == "resume" and paused is not None:
            intervals.append((paused, span.end))
            paused = None
    return intervals


def _parts(courses: Iterable[SampleCourse], name: str) -> Intervals:
    return [(part.start, part.end) for course in courses for part in course.parts if part.name == name]


def _intervals(spans: Iterable[Span]) -> Intervals:
    return [(span.start, span.end) for span in spans]


def _union(intervals: Sequence[tuple[int, int]]) -> Intervals:
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _within(intervals: Intervals, window: Intervals) -> Intervals:
    cut = [(max(start, low), min(end, high)) for start, end in intervals for low, high in window]
    return [(start, end) for start, end in cut if end > start]


def _without(intervals: Intervals, removed: Intervals) -> Intervals:
    removed, left = _union(removed), Intervals()
    for start, end in intervals:
        at = bisect.bisect_right(removed, start, key=lambda piece: piece[1])
        while at < len(removed) and removed[at][0] < end:
            if removed[at][0] > start:
                left.append((start, removed[at][0]))
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _total(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


# ------------------------------------------------------------------------------------------------ the report
_SLOW = 1.1  # a rank that takes so many times the median is named as the cause
_TAIL = 0.9  # the tail of a generation begins when so many of its samples have ended
_LONG_TAIL = 1 / 3
_MOST_ROWS = 20


@dataclass(frozen=True)
class Step:
    """A step in numbers; times in µs."""

    number: int
    wall: int
    shares: Mapping[str, int]
    tail: int  # from the end of most of its samples to that of the last
    waited: SampleCourse | None  # the sample that ended last
    bound: str  # the part that the step's time went to, in words


def summarize_steps(recorded: RunRecord, by_step: Mapping[int, Sequence[SampleCourse]]) -> list[Step]:
    """Return the steps that have ended."""
    steps = []
    for span in recorded.of(DRIVER, "step"):
        number = span.facts.get("step")
        if isinstance(number, int) and not span.is_open:
            shares = driver_shares(recorded, span.start, span.end)
            generations = recorded.between(span.start, span.end, DRIVER, "generate")
            waiting = next((phase for phase in generations if span.start <= phase.start <= phase.end <= span.end), None)
            waited, tail = None, 0
            if waiting is not None and (ended := sorted(by_step.get(number, ()), key=lambda course: course.end)):
                most = ended[min(len(ended) - 1, int(_TAIL * len(ended)))]
                waited, tail = ended[-1], max(0, ended[-1].end - max(most.end, waiting.start))
            bound = _bound(recorded, span, shares, waited, tail)
            steps.append(Step(number, span.duration, shares, tail, waited, bound))
    return steps


def _bound(recorded: RunRecord, step: Span, shares: Mapping[str, int], waited: SampleCourse | None, tail: int) -> str:
    name = max(shares, key=lambda phase: shares[phase])
    percent = f"{100 * shares[name] / max(1, step.duration):.0f} %"
    if name == "generate":
        if waited is not None and tail > _LONG_TAIL * shares[name]:
            last = waited.parts[-1] if waited.parts else None
            is_late = last is not None and last.name == "reward" and 2 * last.duration > waited.end - waited.start
            kind = "its reward" if is_late else "it"
            return f"generation ({percent}), most of it for sample {waited.facts.get('index')}: all wait for {kind}"
        return f"generation ({percent})"
    if name == "fetch":
        return f"generation ({percent}): trainers wait for samples"
    if name == "train":
        slow = slowest_rank(recorded, step.start, step.end)
        return f"training ({percent})" + (f", {slow[0]} is slow" if slow and slow[2] >= _SLOW else "")
    return f"{_WORDS.get(name, name)} ({percent})"


_WORDS = {
    "push": "the push",
    "save": "the checkpoint",
    "publish checkpoint": "the checkpoint",
    "evaluate": "the evaluation",
    "wait for evaluation": "the evaluation",
    "drain": "samples in flight",
    "profile": "the profile",
    OTHER: "the driver",
}


def slowest_rank(recorded: RunRecord, start: int, end: int) -> tuple[str, int, float] | None:
    """Return the trainer with the longest forward and backward passes, their µs, and how many times the median."""
    times = {rank: compute_time(recorded, rank, start, end) for rank in recorded.processes("trainer-")}
    if not any(times.values()):
        return None
    slowest = max(times, key=lambda rank: times[rank])
    return slowest, times[slowest], times[slowest] / max(1.0, median(times.values()))


def report(recorded: RunRecord, by_step: Mapping[int, Sequence[SampleCourse]]) -> Iterator[str]:
    """Yield the lines of the report on an attempt."""
    steps, end = summarize_steps(recorded, by_step), recorded.end
    shares = driver_shares(recorded, 0, end)
    yield f"attempt {recorded.attempt}: {_seconds(end)} in all, {counted(len(steps), 'step')}"
    yield from _clocks(recorded)
    for span in recorded.spans:
        if span.process == DRIVER and span.is_open:
            yield f"  the record ends in the driver's `{span.name}`, which had taken {_seconds(span.duration)}"
    yield ""
    yield "the driver's time            s       %"
    for name, micros in sorted(shares.items(), key=lambda item: -item[1]):
        yield f"  {name:<20}{micros / 1e6:>9.2f}  {100 * micros / max(1, end):>5.1f} %"
    yield f"  {'sum':<20}{sum(shares.values()) / 1e6:>9.2f}  {100 * sum(shares.values()) / max(1, end):>5.1f} %"
    spans = [step for step in recorded.of(DRIVER, "step") if not step.is_open]
    if spans:
        yield ""
        yield from _pools(recorded, spans[0].start, spans[-1].end)
        yield ""
        yield from _steps(steps)


def _clocks(recorded: RunRecord) -> Iterator[str]:
    errors = [machine.error_us for machine in recorded.machines.values()]
    if None in errors:
        lost = sorted({m.host for m in recorded.machines.values() if m.error_us is None})
        yield f"  clocks of {', '.join(lost)} were not measured: their times are those of their wall clocks"
    known = max(error for error in errors if error is not None)
    hosts = len({machine.host for machine in recorded.machines.values()})
    yield f"  {len(errors)} processes on {counted(hosts, 'machine')}; clocks agree within {known / 1000:.2f} ms"


def _pools(recorded: RunRecord, start: int, end: int) -> Iterator[str]:
    yield "from the first step to the last   busy    push    idle     sum"
    for pool in pools(recorded, start, end):
        parts = [100 * micros / max(1, pool.total) for micros in (pool.busy, pool.push, pool.idle)]
        yield f"  {pool.name:<28}" + "".join(f"{part:>6.1f} %" for part in [*parts, sum(parts)])
    mean, most = in_flight(recorded.courses, start, end)
    if most:
        yield f"  requests at busy engines: {mean:.1f} in the mean, {most} at most"
    slow = slowest_rank(recorded, start, end)
    if slow is not None:
        yield f"  slowest rank: {slow[0]}, {_seconds(slow[1])} of forward and backward, {slow[2]:.2f} times the median"


def _steps(steps: Sequence[Step]) -> Iterator[str]:
    longest = sorted(sorted(steps, key=lambda step: -step.wall)[:_MOST_ROWS], key=lambda step: step.number)
    if len(longest) < len(steps):
        yield f"the {len(longest)} longest of {counted(len(steps), 'step')}"
    yield "step        s   gen %  train %  push %   bound by"
    for step in longest:
        share = defaultdict(float, {name: 100 * micros / max(1, step.wall) for name, micros in step.shares.items()})
        parts = f"{share['generate'] + share['fetch']:>7.1f}{share['train']:>9.1f}{share['push']:>8.1f}"
        yield f"{step.number:>4}{step.wall / 1e6:>9.2f}{parts}   {step.bound}"
    waited = max((step for step in steps if step.waited is not None), key=lambda step: step.tail, default=None)
    if waited is not None and waited.waited is not None:
        yield (
            f"longest wait for one sample: step {waited.number}, sample {waited.waited.facts.get('index')},"
            f" {waited.waited.facts.get('tokens', 0)} tokens: {_seconds(waited.tail)} after nine of ten had ended"
        )


def _seconds(micros: float) -> str:
    return f"{micros / 1e6:.2f} s"
