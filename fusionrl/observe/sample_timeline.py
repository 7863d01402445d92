"""The course of a sample: when it waited, was generated, called tools, and was scored. One record for all of it.

    with course(index=17, group=4) as facts:
        start = time.monotonic_ns()
        ...
        part("queue", start)
        facts["status"] = "completed"

`part` may be called from whatever runs within the block, tasks of asyncio included. The record in the timeline's file
(see `spans`) is `["S", start, duration, facts, [[name, start, duration, facts], …]]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from fusionrl.observe.spans import Fact, note, recorder

_Part = tuple[str, int, int, Mapping[str, Fact]]
_parts: ContextVar[list[_Part] | None] = ContextVar("parts of a sample", default=None)

REWARDS = "rewards"  # the lane of what is scored for several samples at once


@contextmanager
def course(**facts: Fact) -> Iterator[dict[str, Fact]]:
    """Record the course of a sample. More facts may be added within the block."""
    active = recorder()
    if active is None:
        yield dict(facts)
        return
    parts: list[_Part] = []
    token, start = _parts.set(parts), time.monotonic_ns()
    course_facts = dict(facts)
    try:
        yield course_facts
    except BaseException:
        course_facts.setdefault("status", "aborted")
        raise
    finally:
        _parts.reset(token)
        active.note_course(start, time.monotonic_ns(), course_facts, parts)


def part(name: str, start_ns: int, **facts: Fact) -> None:
    """Note that a part of the present sample's course has ended; without a sample, a span on the lane of rewards."""
    parts = _parts.get()
    if parts is None:
        note(name, start_ns, time.monotonic_ns(), REWARDS, **facts)
    else:
        parts.append((name, start_ns, time.monotonic_ns(), facts))
