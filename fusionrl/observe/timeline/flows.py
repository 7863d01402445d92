"""The arrows of the timeline: sample → its shard → each trainer's step → its part of the push → the first token of the
new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusionrl.observe.timeline.records import BUFFER, Course, Recorded, Span
from fusionrl.observe.timeline.steps import first_token


@dataclass(frozen=True)
class Stop:
    """A place of an arrow: within this span, at this time."""

    span: Span
    time: int


Flow = list[Stop]


def flows(recorded: Recorded, shown: Mapping[int, Sequence[Course]]) -> list[Flow]:
    """Return the arrows of all steps; `shown`: step → the samples that are in the file."""
    found: list[Flow] = []
    cuts = {one.facts.get("step"): one for one in recorded.of(BUFFER, "cut")}
    trainers = list(recorded.processes("trainer-"))
    trains = {(name, one.facts.get("step")): one for name in trainers for one in recorded.of(name, "train")}
    pushes = {name: recorded.of(name, "push") for name in trainers}
    firsts = _first_turns(shown)
    for step, cut in cuts.items():
        if not isinstance(step, int):
            continue
        for course in shown.get(step, ()):
            if course.parts and course.parts[-1].end <= cut.end:
                last = course.parts[-1]
                found.append([Stop(last, last.end), Stop(cut, max(cut.start, last.end))])
        for name in trainers:
            train = trains.get((name, step))
            if train is None:
                continue
            flow = [Stop(cut, cut.end), Stop(train, train.start)]
            push = next((one for one in pushes[name] if _version(one) >= step and one.start >= train.end), None)
            if push is not None:
                flow.append(Stop(push, push.start))
                turn = firsts.get(_version(push))
                if turn is not None and turn.end > push.end:
                    flow.append(Stop(turn, max(turn.start, min(first_token(turn), turn.end))))
            found.append(flow)
    return found


def first_users(courses: Sequence[Course]) -> list[Course]:
    """Return for each version of the weights the sample that had a token of it first."""
    first: dict[int, tuple[int, Course]] = {}
    for course in courses:
        for turn in course.parts:
            version, time = _version(turn), first_token(turn)
            if turn.name == "turn" and version >= 0 and (version not in first or time < first[version][0]):
                first[version] = (time, course)
    return [course for _, course in first.values()]


def _first_turns(shown: Mapping[int, Sequence[Course]]) -> dict[int, Span]:
    turns = [turn for courses in shown.values() for course in courses for turn in course.parts if turn.name == "turn"]
    found: dict[int, Span] = {}
    for turn in sorted(turns, key=first_token):
        found.setdefault(_version(turn), turn)
    return found


def _version(span: Span) -> int:
    version = span.facts.get("version")
    return version if isinstance(version, int) else -1
