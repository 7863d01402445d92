"""Payloads of `/update_weights_from_tensor`, made without importing SGLang, and how an engine loads them.

SGLang unpickles a list of `(name, tensor)` with an allow-list of globals. Both forms here stay within it:

* `by_value`: a plain pickle with the bytes in it. Works across hosts; the bytes travel base64-encoded by HTTP.
* `SharedBuffer.payload`: an index of what lies where in shared memory, for engines of this host that were started with
  the loader `load` (`--custom-weight-loader`). SGLang's own way is to map a segment when it unpickles a payload and to
  drop it after the load, so that every bucket costs the page faults of a fresh mapping, and to unpickle a view for
  every tensor. Here a mapping stays until its sender has another segment in the same slot.
"""

import json
import math
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence

import pybase64
import torch

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def by_value(named: NamedTensors) -> str:
    """Base64 pickle that holds the tensors' bytes. Views are cloned, as a pickle takes a view's whole
    storage."""
    _name_as_torch_does()
    owned = [(name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in named]
    return pybase64.b64encode(pickle.dumps(owned, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def _name_as_torch_does() -> None:
    """Let pickles name the function that makes a storage from bytes as torch names it: SGLang allows no other name.

    Megatron-core 0.19 puts a function of its own there, and pickles of a trainer's tensors would name that one.
    """
    function = torch.storage._load_from_bytes
    if function.__module__ != "torch.storage":
        function.__module__ = "torch.storage"
        function.__name__ = function.__qualname__ = "_load_from_bytes"


class SharedBuffer:
    """One segment of `num_bytes` of shared memory; reused from update to update.

    It has no name in a file system, so it vanishes with the last process that maps it, however that ends, and the
    size of /dev/shm does not limit it. Other processes of the user open it through this one, by `where`: path, inode
    and bytes. `flat`  # uint8, [num_bytes]

    An engine's ranks copy out of the segment and meet at a barrier before the request is answered: the segment
    may be written again after the answer, not before.
    """

    def __init__(self, num_bytes: int, slot: str = "") -> None:
        """`slot`: one that no other segment of the run's senders has. An engine keeps the last segment of each slot
        mapped, and alive when the sender lets it go."""
        self.slot = slot
        # Open as long as this is: by its number others find the segment.
        descriptor = os.memfd_create("fusionrl-weights")
        weakref.finalize(self, os.close, descriptor)
        size = max(num_bytes, 1)
        os.ftruncate(descriptor, size)
        self.where = (f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino, size)
        self.flat = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.flat.zero_()  # the pages are made now, not when the first bucket is written

    def payload(self, named: NamedTensors) -> str:
        """Base64 pickle, for the load format `spec.LOADER`, that says where each of `named`, contiguous views of
        `flat`, lies."""
        assert all(view.is_contiguous() for _, view in named)
        start = self.flat.data_ptr()
        tensors = [
            [name, str(view.dtype).removeprefix("torch."), list(view.shape), view.data_ptr() - start]
            for name, view in named
        ]
        index = json.dumps({"slot": self.slot, "where": self.where, "tensors": tensors})
        return by_value([(index, torch.zeros(1, dtype=torch.uint8))])  # SGLang wants a tensor with each name


# -------------------------------------------------------------------------------------------------- the engine's end
_held: dict[str, tuple[int, torch.Tensor]] = {}  # slot → inode and bytes of the segment that was in it last


def map_segment(where: tuple[str, int, int]) -> torch.Tensor:
    """The bytes of `SharedBuffer.where`, uint8; RuntimeError if its process is gone or another user's."""
    path, inode, size = where
    try:
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_ino != inode:  # a number that was given out again
                raise FileNotFoundError(path)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(f"shared weights: {path} of their sender cannot be opened ({error})") from error


def take(named: NamedTensors) -> list[tuple[str, torch.Tensor]]:
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


def load(model: torch.nn.Module, named: NamedTensors) -> None:
    """Load what the segment holds into an SGLang model; it may be written again after that."""
    model.load_weights(take(named))
