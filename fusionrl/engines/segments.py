"""The engine's end of shared segments: a weight loader that SGLang calls (`--custom-weight-loader`).

SGLang maps a segment when it unpickles a payload and drops it after the load, so that every bucket costs the page
faults of a fresh mapping, and it unpickles a view for every tensor. Here a mapping stays until its sender has another
segment in the same slot, and the views are made from an index in JSON.

A segment is gone when nobody has it mapped any more, and an engine that is killed gives nothing back until the senders
end: so senders keep their segments for the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_held: dict[str, Tensor] = {}  # slot → what keeps its segment mapped: torch maps no segment twice while one lives


def index_of(slot: str, named: Sequence[tuple[str, Tensor]], flat: Tensor) -> str:
    """What `take` needs to find `named`, contiguous views of `flat`  # uint8, in the segment of `slot`."""
    assert all(view.is_contiguous() for _, view in named)
    start = flat.data_ptr()
    tensors = [
        [name, str(view.dtype).removeprefix("torch."), list(view.shape), view.data_ptr() - start]
        for name, view in named
    ]
    return json.dumps({"slot": slot, "tensors": tensors})


def take(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """(name, view) of all tensors; `named` is one pair, of an index and the whole segment."""
    ((text, flat),) = named
    index = json.loads(text)
    _held[index["slot"]] = flat
    found = []
    for name, dtype_name, sizes, offset in index["tensors"]:
        dtype = getattr(torch, dtype_name)
        num_bytes = torch.Size(sizes).numel() * dtype.itemsize
        found.append((name, flat[offset : offset + num_bytes].view(dtype).view(sizes)))
    return found


def load(model: Any, named: Sequence[tuple[str, Tensor]]) -> None:
    """Load what the segment holds; it may be written again after that."""
    model.load_weights(take(named))
