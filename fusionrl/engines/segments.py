"""The other end of shared segments: how they are mapped, and the weight loader of engines on a CPU.

SGLang calls the loader (`--custom-weight-loader`). Its own way is to map a segment when it unpickles a payload and to
drop it after the load, so that every bucket costs the page faults of a fresh mapping, and to unpickle a view for every
tensor. Here a mapping stays until its sender has another segment in the same slot, and the views are made from an
index.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_held: dict[str, tuple[int, Tensor]] = {}  # slot → inode and bytes of the segment that was in it last


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
    flat, views = _held[slot][1], []
    for name, dtype_name, sizes, offset in index["tensors"]:
        dtype = getattr(torch, dtype_name)
        part = flat[offset : offset + math.prod(sizes) * dtype.itemsize]
        views.append((name, part.view(dtype).view(sizes)))
    return views


def load(model: Loading, named: Sequence[tuple[str, Tensor]]) -> None:
    """Load what the segment holds; it may be written again after that."""
    model.load_weights(take(named))
