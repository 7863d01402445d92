"""A long wait of the run tells whom it waits for: no run stands still in silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray

from fusionrl.weights.in_process import get, wait
from fusionrl.weights.remote_calls import Reference

logger = logging.getLogger(__name__)

FIRST_S = 300.0
_ANSWER_S = 60.0


class LongWait:
    """One wait for the Buffer. Asks it after five minutes, and then ever less often, and logs its answer."""

    def __init__(
        self,
        ask: Callable[[], Reference[str]],
        first_s: float = FIRST_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """`ask` begins a call that returns whom trainers wait for, "" where nobody knows."""
        self._ask, self._answer_s = ask, answer_s
        self._since, self._next_s = time.monotonic(), first_s
        self._asked: Reference[str] | None = None
        self._asked_since = 0.0

    def look(self) -> None:
        """Ask, or tell what was answered. Called again and again during the wait; never blocks."""
        now = time.monotonic()
        if self._asked is not None:
            self._hear(now)
        elif now - self._since >= self._next_s:
            self._next_s *= 2
            self._asked, self._asked_since = self._ask(), now

    def _hear(self, now: float) -> None:
        assert self._asked is not None
        minutes = (now - self._since) / 60
        if wait([self._asked], timeout=0)[0]:
            try:
                if text := get(self._asked):
                    logger.warning("trainers have waited %.1f minutes: %s", minutes, text)
            except (ray.exceptions.RayError, RuntimeError) as error:  # the wait itself ends with it
                logger.debug("the Buffer does not say whom trainers wait for: %s", error)
            self._asked = None
        elif now - self._asked_since >= self._answer_s:
            self._asked_since = now + self._next_s
            logger.warning(
                "trainers have waited %.1f minutes, and the Buffer does not answer: a function of yours may hold its"
                " event loop (a call that blocks, in an async function)",
                minutes,
            )
