"""The arrows of the timeline: sample → its shard → each trainer's step → its part of the push → the first token of the
new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusionrl.observe.timeline.records import BUFFER, RunRecord, SampleCourse, Span
from fusionrl.observe.timeline.steps import first_token


@dataclass(frozen=True)
class Stop:
    """A place of an arrow: within this span, at this time."""

    span: Span
    time: int


Flow = list[Stop]


def flows(recorded: RunRecord, courses_by_step: Mapping[int, Sequence[SampleCourse]]) -> list[Flow]:
    """Return the arrows of all steps; `courses_by_step`: step → the samples that are in the file."""
    arrows: list[Flow] = []
    cuts = {span.facts.get("step"): span for span in recorded.of(BUFFER, "cut")}
    trainers = list(recorded.processes("trainer-"))
    trains = {(name, span.facts.get("step")): span for name in trainers for span in recorded.of(name, "train")}
    pushes = {name: recorded.of(name, "push") for name in trainers}
    firsts = _first_turns(courses_by_step)
    for step, cut in cuts.items():
        if not isinstance(step, int):
            continue
        for course in courses_by_step.get(step, ()):
            if course.parts and course.parts[-1].end <= cut.end:
                last = course.parts[-1]
                arrows.append([Stop(last, last.end), Stop(cut, max(cut.start, last.end))])
        for name in trainers:
            train = trains.get((name, step))
            if train is None:
                continue
            flow = [Stop(cut, cut.end), Stop(train, train.start)]
            push = next((span for span in pushes[name] if _version(span) >= step and span.start >= train.end), None)
            if push is not None:
                flow.append(Stop(push, push.start))
                turn = firsts.get(_version(push))
                if turn is not None and turn.end > push.end:
                    flow.append(Stop(turn, max(turn.start, min(first_token(turn), turn.end))))
            arrows.append(flow)
    return arrows


def first_users(courses: Sequence[SampleCourse]) -> list[SampleCourse]:
    """Return for each version of the weights the sample that had a token of it first."""
    first: dict[int, tuple[int, SampleCourse]] = {}
    for course in courses:
        for turn in course.parts:
            version, time = _version(turn), first_token(turn)
            if turn.name == "turn" and version >= 0 and (version not in first or time < first[version][0]):
                first[version] = (time, course)
    return [course for _, course in first.values()]


def _first_turns(courses_by_step: Mapping[int, Sequence[SampleCourse]]) -> dict[int, Span]:
    turns = [
        turn
        for courses in courses_by_step.values()
        for course in courses
        for turn in course.parts
        if turn.name == "turn"
    ]
    firsts: dict[int, Span] = {}
    for turn in sorted(turns, key=first_token):
        firsts.setdefault(_version(turn), turn)
    return firsts


def _version(span: Span) -> int:
    version = span.facts.get("version")
    return version if isinstance(version, int) else -1
