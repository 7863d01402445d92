"""The order of a push's sends among its sources, kept in a store that all trainer ranks share."""

import time
from collections.abc import Iterable
from threading import Event

import torch.distributed as dist

_POLL_S = 0.002  # a bucket takes a hundred times as long; asking is work for the rank with the store
_CHECK_S = 0.05  # how often a wait looks whether another rank has failed


class PushStopped(RuntimeError):
    """Another rank's part of the push failed; says how."""


class SendOrder:
    """One push: which of its numbered steps are done, and whether some rank has failed."""

    def __init__(self, store: dist.Store | None, push: str, timeout_s: float) -> None:
        """Without a `store` there is one source, which never waits; `push` is the same on all ranks and new."""
        self._store = None if store is None else dist.PrefixStore(push, store)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._stop = Event()
        self._done: list[str] = []

    def left_s(self) -> float:
        """Seconds that the push may still take."""
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, steps: Iterable[int | str]) -> None:
        """Return when all `steps` are done. Another rank's failure is noticed within `_CHECK_S`.

        Raises PushStopped if a rank has failed; RuntimeError if this takes longer than the push may.
        """
        keys = [str(step) for step in steps]
        if self._store is None:
            return
        checked = 0.0
        while True:
            now = time.monotonic()
            if now - checked >= _CHECK_S:
                checked = now
                if self._store.check(["failed"]):
                    raise PushStopped(self._store.get("failed").decode())
            if self._stop.is_set():
                raise PushStopped("this rank's gathering failed")
            if not keys or self._store.check(keys):
                return
            if now > self._deadline:
                raise RuntimeError(f"weight push: no turn within {self._timeout_s:.0f} s (--update-weight-timeout-s)")
            time.sleep(_POLL_S)

    def done(self, step: int | str) -> None:
        """Release the ranks that wait for `step`."""
        if self._store is not None:
            self._store.set(str(step), "")
            self._done.append(str(step))

    def fail(self, error: BaseException) -> None:
        """Make every rank's `wait` raise."""
        self._stop.set()
        if self._store is None or isinstance(error, PushStopped):
            return
        try:
            if not self._store.check(["failed"]):
                self._store.set("failed", str(error))
        except RuntimeError:  # the rank with the store is gone, which the others see as well
            return

    def forget(self) -> None:
        """Take this rank's steps out of the store; only when no rank waits any more."""
        if self._store is not None:
            for key in self._done:
                self._store.delete_key(key)
        self._done.clear()
