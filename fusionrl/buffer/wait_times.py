"""Seconds of a stream between two batches: how long trainers waited and for what, and how long engines had nothing.

Pure: it is told the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fusionrl.pipeline.events import Action, Wait

_IDLE, _ALL = "idle", "all"


class StreamClock:
    """Adds up seconds, from when it is told first. What it was told last holds until it is told again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._holds: set[str] = {_IDLE}

    def note(self, now: float, reason: str | None, has_work: bool) -> None:
        """Tell what holds from now on.

        reason    `Wait.reason` of a driver that waits for a batch; None where it does not
        has_work  samples are under way, and no push holds them up
        """
        passed = 0.0 if self._since is None else now - self._since
        for name in (_ALL, *self._holds):
            self._seconds[name] += passed
        self._since = now
        self._holds = ({reason} if reason else set()) | (set() if has_work else {_IDLE})

    def take(self, now: float) -> dict[str, float]:
        """Return the metrics since the last call, and begin anew."""
        holds = self._holds
        self.note(now, None, True)
        self._holds = holds
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {
            "perf/time_wait_batch_s": seconds["batch"],
            "perf/time_wait_deadline_s": seconds["deadline"],
            "perf/engines_idle": seconds[_IDLE] / seconds[_ALL] if seconds[_ALL] > 0 else 0.0,
        }


def reason_of(actions: Iterable[Action]) -> str | None:
    """Return why the trainers get no batch; None where they wait for none."""
    waits = (action for action in actions if isinstance(action, Wait) and action.who == "trainers")
    return next((action.reason for action in waits if action.reason), None)
