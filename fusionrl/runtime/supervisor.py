"""Wait for actors while watching engines and stop requests."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Self, TypeVar

import ray

from fusionrl.runtime.ray_cluster import FAILURES, gather, root_cause
from fusionrl.weights.remote_calls import Reference

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Terminated(Exception):
    """SIGTERM arrived: the trained steps are saved, then the run ends."""


class StopSignal:
    """Turns the first SIGTERM into a request that the loop finds; a second one acts as Ctrl-C."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._is_announced = False

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGTERM)
        self.install()
        return self

    def install(self) -> None:
        """Take SIGTERM; again after Ray has started, which takes it for itself."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            raise KeyboardInterrupt
        self._requested.set()

    def check(self) -> None:
        """Raise Terminated once SIGTERM has arrived."""
        if self._requested.is_set():
            raise Terminated("SIGTERM")

    def is_requested(self) -> bool:
        """Return whether SIGTERM has arrived. The first time, log what happens next."""
        if self._requested.is_set() and not self._is_announced:
            self._is_announced = True
            logger.warning("SIGTERM: this rollout is trained to its end, then the run stops; a second one ends it now")
        return self._requested.is_set()


class Supervisor:
    """Waits for calls of actors. About once a second it checks the engines, which may raise, and looks for a stop."""

    def __init__(self, check_engines: Callable[[bool], object], stop: StopSignal, interval_s: float = 1.0) -> None:
        """`check_engines` gets whether the engines generate: only then can they be asked for a token."""
        self._check_engines, self._stop, self._interval_s = check_engines, stop, interval_s
        self._next_look = 0.0
        self._has_dead = False  # an engine, or the router, died while trainers worked

    def wait(self, ref: Reference[T]) -> T:
        """Wait for the Buffer's answer while the engines generate. A stop request ends the wait."""

        def look() -> None:
            self._stop.check()
            self._check_engines(True)

        return self._gather([ref], look, is_generating=True)[0]

    def finish(self, refs: Sequence[Reference[T]]) -> list[T]:
        """Wait for trainers. Raises at the first failure, as the other ranks may be waiting for that one.

        A stop request or a dead engine is logged and does not end the wait: a checkpoint holds whole rollouts. After a
        stop request engines may die, as no push comes.
        """
        return self._gather(refs, self._look, is_generating=False)

    def _look(self) -> None:
        """Log a stop request, or a dead engine. After a stop request the engines may have received the signal too."""
        if self._stop.is_requested() or self._has_dead:
            return
        try:
            self._check_engines(False)
        except FAILURES as error:
            self._has_dead = True
            logger.error("the run ends after this training step: %s", root_cause(error))

    def _gather(self, refs: Sequence[Reference[T]], look: Callable[[], None], *, is_generating: bool) -> list[T]:
        try:
            answers = gather(refs, lambda: look() if self._is_time() else None, self._interval_s)
        except ray.exceptions.RayTaskError:
            # Raises, with the engine's log, if a dead engine is the cause; a stop request does not hide it.
            self._check_engines(is_generating)
            raise
        if self._is_time():  # all waits may be shorter than the interval; a stop request must not discard the answers
            self._look()
        return answers

    def _is_time(self) -> bool:
        is_time = time.monotonic() >= self._next_look
        if is_time:
            self._next_look = time.monotonic() + self._interval_s
        return is_time
