"""Waiting for actors: meanwhile the engines are looked after, and a stop request is heard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import ray

from fusionrl.base.waits import waiting
from fusionrl.sync.calls import Reference
from fusionrl.sync.local import get, wait

T = TypeVar("T")


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

        A stop request is heard and does not end the wait: a checkpoint holds whole rollouts. From then on the engines
        may die, as no push comes.
        """
        return self._gather(refs, self._hear, is_generating=False)

    def _hear(self) -> None:
        """Hear a stop request, which ends no wait here. With it, the engines may have got the signal as well."""
        if not self._stop.hear():
            self._check_engines(False)

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
                    (look if pending else self._hear)()
                    self._next_look = time.monotonic() + self._interval_s
        return get(list(refs))
