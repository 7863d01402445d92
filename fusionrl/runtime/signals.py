"""SIGTERM as a request to stop."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)


class Terminated(Exception):
    """SIGTERM arrived: the trained steps are saved, then the run ends."""


class StopSignal:
    """Turns the first SIGTERM into a request that the loop finds; a second one acts as Ctrl-C."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._is_heard = False

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
        if self._asked.is_set():
            raise KeyboardInterrupt
        self._asked.set()

    def check(self) -> None:
        """Raise Terminated once SIGTERM has arrived."""
        if self._asked.is_set():
            raise Terminated("SIGTERM")

    def hear(self) -> bool:
        """Return whether SIGTERM has arrived. The first time that it has, say what happens next."""
        if self._asked.is_set() and not self._is_heard:
            self._is_heard = True
            logger.warning("SIGTERM: this rollout is trained to its end, then the run stops; a second one ends it now")
        return self._asked.is_set()
