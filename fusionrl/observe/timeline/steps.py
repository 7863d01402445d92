"""Which sample was trained in which step, and the parts of a sample's course in detail."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.timeline.records import RunRecord, SampleCourse, Span

_INDEX = re.compile(rb'"index":(\d+)')
_HEAD_BYTES = 400  # of a row: its index is at its beginning


def steps_of(run: Path, recorded: RunRecord) -> dict[int, list[SampleCourse]]:
    """Return step → the courses of its samples, by `rollouts/`; of a step without a file, those that ended in it.

    Samples that no step trained are under 0: of evaluations, dropped, or under way at the end.
    """
    step_of_index = _indices(run, recorded.attempt)
    rollouts = recorded.of("buffer", "rollout")
    courses_by_step: dict[int, list[SampleCourse]] = defaultdict(list)
    for course in recorded.courses:
        if course.facts.get("evaluation"):
            courses_by_step[0].append(course)
            continue
        index = course.facts.get("index")
        step = step_of_index.get(index) if isinstance(index, int) else None
        if step is None and not step_of_index:
            step = next((_step(rollout) for rollout in rollouts if rollout.start <= course.end <= rollout.end), None)
        courses_by_step[step or 0].append(course)
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


def _step(rollout: Span) -> int:
    step = rollout.facts.get("step")
    return step if isinstance(step, int) else 0


def detailed(part: Span) -> list[Span]:
    """Return a part, and for a turn whose engine told its times: the queue, the prefill and the decode in it."""
    facts = part.facts
    if part.name != "turn":
        return [part]
    first = _micros(facts.get("first_token_s"))
    took = min(_micros(facts.get("engine_s")), part.duration)
    if not first or not took:
        return [part]
    start = part.end - took
    queue = min(_micros(facts.get("queue_s")), first)
    bounds = [("queue", start, start + queue), ("prefill", start + queue, start + first)]
    bounds.append(("decode", start + first, part.end))
    inner = [Span(part.process, part.lane, name, begin, min(end, part.end)) for name, begin, end in bounds]
    return [part, *(span for span in inner if span.end > span.start)]


def first_token(part: Span) -> int:
    """Return when a turn's first token came, as well as it is known: not before this."""
    return next((span.start for span in detailed(part) if span.name == "decode"), part.start)


def _micros(seconds: object) -> int:
    return int(1e6 * seconds) if isinstance(seconds, int | float) else 0
