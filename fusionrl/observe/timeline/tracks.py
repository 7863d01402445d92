"""Spans onto tracks: on one track they nest or follow each other, as the format demands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

# Lanes with a track of their own; those of threads share the first tracks of their process.
OWN_TRACKS = ("rollouts", "stages", "evaluations", "rewards", "send")


class _Timed(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


T = TypeVar("T", bound=_Timed)


def nested(spans: Iterable[T]) -> list[list[T]]:
    """Divide spans over as few tracks as it takes one after the other; in each, in order of their starts."""
    tracks: list[tuple[list[T], list[int]]] = []  # spans, and the ends of those that are open
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for placed, open_ends in tracks:
            while open_ends and open_ends[-1] <= span.start:
                open_ends.pop()
            if not open_ends or span.end <= open_ends[-1]:
                placed.append(span)
                open_ends.append(span.end)
                break
        else:
            tracks.append(([span], [span.end]))
    return [placed for placed, _ in tracks]


def track_of(lane: str) -> str:
    """Return the track of a lane: its own, or "" for that of the process."""
    return lane if lane in OWN_TRACKS else ""
