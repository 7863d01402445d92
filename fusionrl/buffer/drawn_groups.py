"""The groups that a rollout function has drawn and not returned: who they are, and whether it still has them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from fusionrl.data.sample import Sample


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
