"""Waiting for actors: meanwhile the engines are looked after, and a stop request is heard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import ray

from fusionrl.base.pending_calls import waiting
from fusionrl.runtime.ray_cluster import FAILURES, root_cause
from fusionrl.weights.in_process import get, wait
from fusionrl.weights.remote_calls import Reference

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StopRequests(Protocol):
    """SIGTERM, as the driver keeps it."""

    def check(self) -> None:
        """Raise once a stop was asked for."""

    def hear(self) -> bool:
        """Return whether a stop was asked for. Once, tells the user what is finished before the run stops."""


class Supervisor:
    """Waits for calls of actors. About once a second it checks the engines, which may raise, and looks for a stop."""

    def __init__(self, check_engines: Callable[[bool], object], stop: StopRequests, interval_s: float = 1.0) -> None:
        """`check_engines` is told whether the engines generate; only then they can be asked for a token."""
        self._check_engines, self._stop, self._interval_s = check_engines, stop, interval_s
        self._next_look = 0.0
        self._has_dead = False  # an engine, or the router, died while trainers worked

    def wait(self, ref: Reference[T], look_too: Callable[[], None] = lambda: None) -> T:
        """Wait for the Buffer's answer while the engines generate. A stop request ends the wait.

        look_too  called about once a second
        """

        def look() -> None:
            self._stop.check()
            self._check_engines(True)
            look_too()

        return self._gather([ref], look, is_generating=True)[0]

    def finish(self, refs: Sequence[Reference[T]]) -> list[T]:
        """Wait for trainers. Raises at the first failure, as the other ranks may be waiting for that one.

        A stop request or a dead engine is logged and does not end the wait: a checkpoint holds whole rollouts. After a
        stop request engines may die, as no push comes.
        """
        return self._gather(refs, self._look, is_generating=False)

    def _look(self) -> None:
        """Log a stop request, or a dead engine. After a stop request the engines may have received the signal too."""
        if self._stop.hear() or self._has_dead:
            return
        try:
            self._check_engines(False)
        except FAILURES as error:
            self._has_dead = True
            logger.error("the run ends after this training step: %s", root_cause(error))

    def _gather(self, refs: Sequence[Reference[T]], look: Callable[[], None], *, is_generating: bool) -> list[T]:
        pending = list(refs)
        with waiting(lambda: pending):
            while pending:
                done, pending = wait(pending, num_returns=1, timeout=self._interval_s)
                try:
                    get(done)
                except ray.exceptions.RayTaskError:
                    # Raises, with the engine's log, if a dead engine is the cause; a stop request does not hide it.
                    self._check_engines(is_generating)
                    raise
                if time.monotonic() >= self._next_look:
                    # All waits may be shorter than the interval. What is done outlives a stop request.
                    (look if pending else self._look)()
                    self._next_look = time.monotonic() + self._interval_s
        return get(list(refs))
