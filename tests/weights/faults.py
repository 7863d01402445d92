"""Targets of a push at which something goes wrong. Ranks that are handed one import this, which takes no time."""

from typing import Any

import psutil


class Faulty:
    """A handle's target on which something happens when `method` is called for the n-th time; picklable with its count:
    the process `pid` is killed, or without one the call is refused."""

    def __init__(self, target: Any, method: str, number: int = 1, pid: int | None = None) -> None:
        self._target, self._method, self._number, self._pid = target, method, number, pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._number -= name == self._method
            if name == self._method and self._number == 0:
                if self._pid is None:
                    raise RuntimeError(f"no {name} today")
                psutil.Process(self._pid).kill()
            return getattr(self._target, name)(*args, **kwargs)

        return call
