"""The state of a rank as arrays; without torch, as who holds a snapshot needs none of it. `rank_state.py` makes it."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Piece:
    """A range of one parameter, from its element `first` on: name of a tensor ("param", "exp_avg", …) → its values."""

    first: int
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class RankState:
    """All that training changes on a rank.

    holders    ranks with the same parameters have the same: (of the dense layers, of experts)
    scheduled  position in the schedule
    steps      step counts of the optimizer's groups
    rng        RNG states, pickled
    buffers    bytes of the model's buffers
    pieces     chunk and name of a parameter → this rank's range of it
    """

    holders: tuple[tuple[int, ...], tuple[int, ...]]
    counters: dict[str, int]
    scheduled: int
    steps: list[Any]
    rng: bytes
    buffers: list[np.ndarray]
    pieces: dict[str, Piece]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors."""
        arrays = [array for piece in self.pieces.values() for array in piece.values.values()]
        return sum(array.nbytes for array in [*arrays, *self.buffers])
