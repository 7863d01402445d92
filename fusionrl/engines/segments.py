"""The other end of shared segments: how they are mapped, and the weight loader of engines on a CPU.

SGLang calls the loader (`--custom-weight-loader`). Its own way is to map a segment when it unpickles a payload and to
drop it after the load, so that every bucket costs the page faults of a fresh mapping, and to unpickle a view for every
tensor. Here a mapping stays until its sender has another segment in the same slot, and the views are made from an
index.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_held: dict[str, tuple[int, Tensor]] = {}  # slot → inode and bytes of the segment that was in it last


class Views:
    """Contiguous tensors in the bytes of `flat`  # uint8: one operation each, where slicing and viewing takes three."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._typed: dict[torch.dtype, tuple[Tensor, int]] = {}  # the bytes as numbers, and the first one's place

    def at(self, offset: int, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        """The tensor of `sizes` that begins at byte `offset`, a multiple of its numbers' size."""
        if dtype not in self._typed:
            num_bytes = self._flat.numel() // dtype.itemsize * dtype.itemsize
            typed = self._flat[:num_bytes].view(dtype)
            self._typed[dtype] = typed, typed.storage_offset()
        typed, first = self._typed[dtype]
        place, rest = divmod(offset, dtype.itemsize)
        strides, count = [], 1
        for size in reversed(sizes):
            strides.append(count)
            count *= size
        if count == 0:
            return typed.new_empty(tuple(sizes))  # it lies nowhere
        if rest or place < 0 or place + count > typed.numel():
            raise ValueError(f"a tensor of {list(sizes)} {dtype} at byte {offset} of {self._flat.numel()}")
        return typed.as_strided(tuple(sizes), strides[::-1], first + place)


class Loading(Protocol):
    """An SGLang model, as its loaders call it."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], /) -> object:
        """Load tensors by their names in the checkpoint."""


def map_segment(where: tuple[str, int, int]) -> Tensor:
    """The bytes of `SharedBuffer.where`  # uint8.

    Raises:
        RuntimeError: it cannot be opened, as its process is gone or another user's.
    """
    path, inode, size = where
    try:
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_ino != inode:  # a number that was given out again
                raise FileNotFoundError(path)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(f"shared weights: {path} of their sender cannot be opened ({error})") from error


def take(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """(name, view of the segment) of all tensors that the index of `SharedBuffer.payload` lists.

    `named` is what such a payload holds: the index as a name, and a tensor that means nothing.
    """
    index = json.loads(named[0][0])
    slot, where = index["slot"], index["where"]
    if slot not in _held or _held[slot][0] != where[1]:
        _held.pop(slot, None)  # gone before the next one comes
        _held[slot] = where[1], map_segment(where)
    views = Views(_held[slot][1])
    return [
        (name, views.at(offset, getattr(torch, dtype_name), sizes))
        for name, dtype_name, sizes, offset in index["tensors"]
    ]


def load(model: Loading, named: Sequence[tuple[str, Tensor]]) -> None:
    """Load what the segment holds; it may be written again after that."""
    model.load_weights(take(named))
