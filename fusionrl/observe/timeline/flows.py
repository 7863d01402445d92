"""The arrows of the timeline: sample → its shard → each trainer's step → its part of the push → the first token of the
new weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from fusionrl.observe.timeline.records import BUFFER, RunRecord, SampleCourse, Span
from fusionrl.observe.timeline.steps import first_token

Flow = list[tuple[Span, int]]
"""An arrow: spans, each with the time within it at which the arrow passes."""


def flows(recorded: RunRecord, courses_by_step: Mapping[int, Sequence[SampleCourse]]) -> list[Flow]:
    """Return the arrows of all steps; `courses_by_step`: step → the samples that are in the file."""
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
