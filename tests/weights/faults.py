"""Targets of a push at which something goes wrong. Ranks that are handed one import this, which takes no time."""

from __future__ import annotations

from typing import Any

import psutil


class Striking:
    """A handle's target that kills a process when a method is called for the n-th time; picklable with its count."""

    def __init__(self, target: Any, method: str, number: int, pid: int) -> None:
        self._target, self._strikes_at, self._number, self._pid = target, method, number, pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == self._strikes_at:
                self._number -= 1
                if self._number == 0:
                    psutil.Process(self._pid).kill()
            return getattr(self._target, name)(*args, **kwargs)

        return call


class Refusing:
    """A handle's target that refuses a method the first time that it is called."""

    def __init__(self, target: Any, method: str) -> None:
        self._target, self._method = target, method

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name != self._method:
            return getattr(self._target, name)
        self._method = ""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"no {name} today")

        return refuse
