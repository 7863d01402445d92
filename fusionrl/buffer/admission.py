"""Groups that a rollout function draws from a stream: each is admitted first, and remembered until it is returned."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fusionrl.data.sample import Sample
from fusionrl.rollout.types import RolloutAborted

_LOOK_S = 0.05  # between two questions of a thread that waits
_MOST_EMPTY = 100  # answers without a group, in one turn of the asker's event loop, before it gets what it wants
Groups = list[list[Sample]]


class AdmissionGate(Protocol):
    """The stream."""

    def draw_groups(self, num_groups: int, *, beyond: bool) -> Groups:
        """Return at most `num_groups` groups; `beyond`: all of them, whatever the bound says."""

    def park_groups(self, groups: Groups) -> None:
        """Park groups; those that were not drawn here go to the data source."""


class AdmissionSource:
    """Data source for a rollout function under a stream; `get_samples` and `add_samples` ask the controller.

    If no group may be admitted, `get_samples`
    - gives nothing to an event loop, which continues with its groups and asks again. A loop that only keeps asking
      would hang: it gets what it wants.
    - gives the thread of the call what it wants: it has dropped groups and cannot return without others.
    - makes any other thread wait.
    Groups given beyond the bound are dropped once they are too old.
    """

    def __init__(self, gate: AdmissionGate, hooked: Any, *, asks_again: bool) -> None:
        """`asks_again`: the function may get nothing at any time, and asks again later."""
        self._gate, self._hooked, self._asks_again = gate, hooked, asks_again
        self._is_ending = threading.Event()
        self._caller: int | None = None  # thread of the call that is under way
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooked, name)

    def __len__(self) -> int:
        return len(self._hooked)

    def begin_call(self) -> None:
        """Note that the thread that calls this runs the function now."""
        self._caller = threading.get_ident()

    def end(self) -> None:
        """End all waits."""
        self._is_ending.set()

    def get_samples(self, num_samples: int) -> Groups:
        """Return at most `num_samples` groups; see the class.

        Raises:
            RolloutAborted: the run ends.
        """
        if num_samples <= 0:
            return []
        while True:
            if self._is_ending.is_set():
                raise RolloutAborted("the run ends")
            groups = self._gate.draw_groups(num_samples, beyond=False)
            if groups or self._asks_again:
                return groups
            loop = _running_loop()
            if loop is not None:
                return self._gate.draw_groups(num_samples, beyond=True) if self._spins(loop) else []
            if threading.get_ident() == self._caller and (groups := self._gate.draw_groups(num_samples, beyond=True)):
                return groups
            time.sleep(_LOOK_S)

    def add_samples(self, samples: Groups) -> None:
        """Hand groups back, with what they have; they are given again first."""
        self._gate.park_groups(samples)

    def _spins(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop's thread has got nothing again and again without a turn of the loop."""
        seen = self._local
        if getattr(seen, "num_empty", 0) == 0:
            seen.num_empty = 0
            loop.call_soon(self._turned, seen)
        seen.num_empty += 1
        if seen.num_empty < _MOST_EMPTY:
            return False
        seen.num_empty = 0
        return True

    @staticmethod
    def _turned(seen: threading.local) -> None:
        seen.num_empty = 0


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass
class DrawnGroup:
    """One of them.

    num_calls  calls of the function that have returned without it while the trainers waited for it
    """

    ordinal: int
    group_index: int | None
    samples: list[weakref.ref[Sample]]
    num_calls: int = 0

    @property
    def is_held(self) -> bool:
        """Return whether the function still has any of its samples."""
        return any(sample() is not None for sample in self.samples)


class DrawnGroups:
    """All of them, by their ordinals."""

    def __init__(self) -> None:
        self._drawn: dict[int, DrawnGroup] = {}

    def __iter__(self) -> Iterator[DrawnGroup]:
        return iter(list(self._drawn.values()))

    def __bool__(self) -> bool:
        return bool(self._drawn)

    def add(self, ordinal: int, group: list[Sample]) -> None:
        """Note that the function gets a group."""
        self._drawn[ordinal] = DrawnGroup(ordinal, group[0].group_index, [weakref.ref(sample) for sample in group])

    def take(self, group: list[Sample]) -> DrawnGroup | None:
        """Forget the group that was drawn as this one, and return it; None: there is none. It may be other objects."""
        mine = {id(sample) for sample in group}
        for drawn in self._drawn.values():
            if any(id(reference()) in mine for reference in drawn.samples):
                return self._drawn.pop(drawn.ordinal)
        index = group[0].group_index
        for drawn in self._drawn.values():
            if index is not None and drawn.group_index == index:
                return self._drawn.pop(drawn.ordinal)
        return None

    def forget(self, drawn: DrawnGroup) -> None:
        """Forget a group."""
        del self._drawn[drawn.ordinal]
