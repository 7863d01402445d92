"""`RevocableStore`: the store of a process group whose making can be called off.

A member of a gloo group waits inside the constructor for the addresses of all others, as long as the group's own limit,
and an SGLang scheduler that waits there answers nothing. torch asks a store that is written in Python by its methods;
so this one looks, while it waits, whether another member has called the meeting off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.02


class RevocableStore(dist.Store):
    """Another store, whose waits end early. Whoever makes a group of it keeps it as long as the group."""

    def __init__(self, store: dist.Store, check: Callable[[], None], limit_s: float) -> None:
        """Take the store.

        Args:
            store: has the keys.
            check: raises once the wait is pointless.
            limit_s: seconds of one wait.
        """
        super().__init__()
        self._store, self._check, self._limit_s = store, check, limit_s

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. The group's own time limit, `timeout`, is not what counts.

        Raises:
            RuntimeError: `check` raised one, or the keys did not come in time.
        """
        start = time.monotonic()
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() - start > self._limit_s:
                raise RuntimeError(
                    f"the group for a weight push: not all of its ranks joined within {self._limit_s:.0f} s"
                    " (--update-weight-timeout-s)"
                )
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys; return their values."""
        self.wait(keys)
        return self._store.multi_get(list(keys))

    # What follows does not wait: torch asks for each by its name.
    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._store.multi_set(list(keys), list(values))

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._store.compare_set(key, expected, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()
