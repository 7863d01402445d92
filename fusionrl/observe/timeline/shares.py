"""Where the time of a run went: shares that add up to all of it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusionrl.observe.timeline.records import BUFFER, DRIVER, RunRecord, SampleCourse, Span

OTHER = "other"
Intervals = list[tuple[int, int]]
_PUSH = ("prepare push", "push", "write weights")
_WORK = ("train", "score", "score ahead", "prepare", "values", "process rewards", "validate")


@dataclass(frozen=True)
class Pool:
    """The time of a pool of processes within the run's steps, in microseconds: busy, in a push, idle."""

    name: str
    busy: float
    push: float
    total: float

    @property
    def idle(self) -> float:
        """Return the time in which the pool neither works nor gets weights, in the unit of the others."""
        return self.total - self.busy - self.push


def driver_shares(recorded: RunRecord, start: int, end: int) -> dict[str, int]:
    """Return phase of the driver → its microseconds between two times; the values add up to `end - start`.

    Of phases within each other the innermost one counts, but for the parts of a push. `OTHER` is in no phase.
    """
    spans = [
        (max(phase.start, start), min(phase.end, end), phase.name)
        for phase in recorded.of(DRIVER, *_DRIVER_PHASES)
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
    for low, high in removed:
        cut = [piece for start, end in intervals for piece in ((start, min(end, low)), (max(start, high), end))]
        intervals = [(start, end) for start, end in cut if end > start]
    return intervals


def _total(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)
