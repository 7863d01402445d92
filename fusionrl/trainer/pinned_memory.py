"""Copies in pinned host memory, in blocks of one size: see `plan/memory/pinned.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusionrl.plan.memory.pinned import BLOCK


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedMemory:
    """Keeps tensors' bytes one after the other in blocks. `allocate` makes a block of `block` bytes."""

    def __init__(self, allocate: Callable[[int], Tensor] = _pinned, block: int = BLOCK) -> None:
        self._allocate, self._block = allocate, block
        self._left: Tensor | None = None  # of the last block

    def keep(self, data: Tensor) -> Kept:
        """Copy `data`, which is contiguous and on any device; on a GPU the copy is under way on the current stream."""
        pieces, missing = [], data.numel() * data.element_size()
        while missing:
            if self._left is None or not self._left.numel():
                self._left = self._allocate(self._block)
            piece, self._left = self._left[:missing], self._left[missing:]
            pieces.append(piece)
            missing -= piece.numel()
        copies = Kept(pieces)
        copies.write(data)
        return copies


class Kept:
    """The bytes of one tensor, in pieces of pinned memory."""

    def __init__(self, pieces: list[Tensor]) -> None:
        self._pieces = pieces

    def write(self, data: Tensor) -> None:
        """Copy `data` here, which has as many bytes as what was kept."""
        for piece, part in self._with(data):
            piece.copy_(part, non_blocking=True)

    def read(self, data: Tensor) -> None:
        """Copy what is here into `data`."""
        for piece, part in self._with(data):
            part.copy_(piece, non_blocking=True)

    def _with(self, data: Tensor) -> list[tuple[Tensor, Tensor]]:
        flat = data.detach().view(-1).view(torch.uint8)
        sizes = [piece.numel() for piece in self._pieces]
        return list(zip(self._pieces, flat.split(sizes), strict=True)) if sizes else []
