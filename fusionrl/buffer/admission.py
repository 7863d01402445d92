"""Groups that a rollout function draws from a stream: each is admitted first, and remembered until it is returned.

A group belongs to the call that drew it: one that the call neither returns nor hands back is dropped when it returns.
All groups of a function that says `keeps_groups = True` stay with the function until it returns them. Where it says
nothing, so do those that a thread of its own drew, as long as the thread lives.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.rollout.types import RolloutAborted, keeps_draws

_LOOK_S = 0.05  # between two questions of a thread that waits
_MOST_EMPTY = 100  # answers without a group, in one turn of the asker's event loop, before it gets what it wants
Groups = list[list[Sample]]
IsKept = Callable[[], bool]  # whether a group stays with the function when a call returns
Draw = Callable[[int, IsKept, bool], Groups]  # at most as many groups; all of them, whatever the bound says, for True


# Whether the code that runs is part of a call: also in an event loop that the call hands a coroutine to, and not in a
# thread that it starts, which may outlive it.
_in_call: ContextVar[bool] = ContextVar("in_call", default=False)


class AdmissionSource:
    """Data source for a rollout function under a stream; `get_samples` and `add_samples` ask the controller.

    If no group may be admitted, `get_samples`
    - gives nothing to an event loop, which continues with its groups and asks again. A loop that only keeps asking
      would hang: it gets what it wants.
    - gives the thread of the call what it wants: it has dropped groups and cannot return without others.
    - makes any other thread wait.
    Groups given beyond the bound are dropped once they are too old.
    """

    def __init__(self, draw: Draw, park: Callable[[Groups], None], hooked: Any, keeps_groups: bool | None) -> None:
        """`draw` and `park` are the stream's; the latter gives groups that were not drawn here to the data source.

        `keeps_groups`: as the function says; one that keeps groups may get none at any time, and asks again.
        """
        self._draw, self._park, self._hooked, self._keeps_groups = draw, park, hooked, keeps_groups
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
        _in_call.set(True)

    def end(self) -> None:
        """End all waits."""
        self._is_ending.set()

    def get_samples(self, num_samples: int) -> Groups:
        """Return at most `num_samples` groups; see the class. RolloutAborted: the run ends."""
        if num_samples <= 0:
            return []
        keeps_all = bool(self._keeps_groups) or keeps_draws()
        is_kept: IsKept = lambda: keeps_all  # noqa: E731
        if not keeps_all and self._keeps_groups is None and not _in_call.get():
            is_kept = threading.current_thread().is_alive  # the thread of a pool ends with the call
        while True:
            if self._is_ending.is_set():
                raise RolloutAborted("the run ends")
            groups = self._draw(num_samples, is_kept, False)
            if groups or keeps_all:
                return groups
            loop = _running_loop()
            if loop is not None and not self._spins(loop):
                return []
            if loop is not None or threading.get_ident() == self._caller:
                groups = self._draw(num_samples, is_kept, True)
                if groups or loop is not None:
                    return groups
            time.sleep(_LOOK_S)

    def add_samples(self, samples: Groups) -> None:
        """Hand groups back, with what they have; they are given again first."""
        self._park(samples)

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
    """A group that the function has.

    samples    as the function got them; it alone holds them
    is_kept    it stays with the function when a call returns
    num_calls  calls of the function that have returned without it while the trainers waited for it
    """

    ordinal: int
    group_index: int | None
    samples: list[weakref.ref[Sample]]
    is_kept: IsKept
    num_calls: int = 0

    def holds_any(self, samples: list[Sample]) -> bool:
        return any(mine() is sample for mine in self.samples for sample in samples)


class DrawnGroups:
    """All groups that the function has, by their ordinals.

    keeps_all  the function has returned a group later than in the call that drew it, so it may keep any
    """

    def __init__(self) -> None:
        self.keeps_all = False
        self._drawn: dict[int, DrawnGroup] = {}
        self._ended: list[DrawnGroup] = []

    def __iter__(self) -> Iterator[DrawnGroup]:
        return iter(list(self._drawn.values()))

    def num_among(self, ordinals: Container[int]) -> int:
        return sum(ordinal in ordinals for ordinal in self._drawn)

    def add(self, ordinal: int, group: list[Sample], is_kept: IsKept) -> None:
        samples = [weakref.ref(sample) for sample in group]
        self._drawn[ordinal] = DrawnGroup(ordinal, group[0].group_index, samples, is_kept)

    def take(self, group: list[Sample]) -> DrawnGroup | None:
        """Forget the group that was drawn as this one, and return it; None: there is none. It may be other objects."""
        index = group[0].group_index
        for drawn in self:
            if drawn.holds_any(group):
                return self._drawn.pop(drawn.ordinal)
        for drawn in self:
            if index is not None and drawn.group_index == index:
                return self._drawn.pop(drawn.ordinal)
        return None

    def is_late(self, group: list[Sample]) -> bool:
        """Return whether it was forgotten when a call returned, by the samples themselves: numbers may be anybody's."""
        return any(drawn.holds_any(group) for drawn in self._ended)

    def end_call(self) -> list[DrawnGroup]:
        """Forget the groups that belong to the call that returns, and return them."""
        ended = [drawn for drawn in self if not self.keeps_all and not drawn.is_kept()]
        for drawn in ended:
            del self._drawn[drawn.ordinal]
        self._ended = [drawn for drawn in self._ended + ended if any(sample() is not None for sample in drawn.samples)]
        return ended
