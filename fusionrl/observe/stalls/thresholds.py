"""When the watchdog speaks: a phase takes much longer than it usually does.

A phase is late after max(floor, 5 x its median), and then again after pauses that double: after 60 s, 120 s, 240 s, …
One that has never ended has no median; it is given 5 x the floor. Pure: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

FLOOR_S = 60.0
FACTOR = 5.0


@dataclass(frozen=True)
class Phase:
    """A phase of the driver that has not ended. `since` comes from the same clock as `now`."""

    name: str
    since: float


@dataclass(frozen=True)
class LatePhase:
    """A phase of which to speak.

    seconds  since it began
    usual_s  its median so far; None: no phase of this name has ended yet
    number   of the report about this phase, from 1
    is_last  it has reached --stall-timeout-s: the run ends
    """

    phase: str
    seconds: float
    usual_s: float | None
    number: int
    is_last: bool = False


@dataclass(frozen=True)
class EndedPhase:
    """A phase that was spoken of, and has ended after some `seconds`."""

    phase: str
    seconds: float


class StallClock:
    """Decides for one phase after the other. It is asked again and again; it never blocks."""

    def __init__(self, floor_s: float = FLOOR_S, timeout_s: float | None = None) -> None:
        """timeout_s  --stall-timeout-s: the run ends with a phase that takes so long"""
        self._floor_s, self._timeout_s = floor_s, timeout_s
        self._phase: Phase | None = None
        self._next_s = 0.0
        self._number = 0

    def look(
        self, now: float, phase: Phase | None, lasted: Mapping[str, Sequence[float]]
    ) -> LatePhase | EndedPhase | None:
        """Return what to speak of now.

        phase   the innermost phase of now; None: none
        lasted  name of a phase → seconds of those that have ended
        """
        usual_s = median(times) if phase is not None and (times := lasted.get(phase.name)) else None
        if phase != self._phase:
            before, was_reported = self._phase, self._number > 0
            self._phase, self._number = phase, 0
            self._next_s = FACTOR * self._floor_s if usual_s is None else max(self._floor_s, FACTOR * usual_s)
            return EndedPhase(before.name, now - before.since) if before is not None and was_reported else None
        if phase is None:
            return None
        seconds = now - phase.since
        is_last = self._timeout_s is not None and seconds >= self._timeout_s
        if seconds < self._next_s and not is_last:
            return None
        self._number += 1
        self._next_s = 2 * seconds
        return LatePhase(phase.name, seconds, usual_s, self._number, is_last)
