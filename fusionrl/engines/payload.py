"""Payloads of `/update_weights_from_tensor`, made without importing SGLang.

SGLang unpickles a list of `(name, tensor)` with an allow-list of globals. Both forms here stay within it:

* `by_value`: a plain pickle with the bytes in it. Works across hosts; the bytes travel base64-encoded by
  HTTP.
* `SharedTensors`: the tensors as views of one shared-memory segment; the payload has its name and the
  offsets. torch pickles the views one by one but every one refers to the same storage, so the receiver maps
  the segment once. The sharing strategy is "file_system": with torch's default "file_descriptor" the
  receiver has to ask the sender for the descriptor over a connection that needs multiprocessing's key of the
  sender, which an unrelated process lacks; that error ends the scheduler.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import pybase64
import torch

NamedTensors = Sequence[tuple[str, torch.Tensor]]

_ALIGNMENT = 64
_strategy_lock = threading.Lock()


def by_value(named: NamedTensors) -> str:
    """Base64 pickle that holds the tensors' bytes. Views are cloned, as a pickle takes a view's whole
    storage."""
    owned = [(name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in named]
    return pybase64.b64encode(pickle.dumps(owned, protocol=pickle.HIGHEST_PROTOCOL)).decode()


class SharedTensors:
    """One shared-memory segment with room for given tensors; reused from update to update.

    SGLang's ranks copy out of the segment and meet at a barrier before the request is answered: the segment
    may be written again after the answer, not before. Both ends must be on one host.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        """Allocate for tensors of these names, shapes and dtypes."""
        offsets, end = [], 0
        for _, shape, dtype in shapes:
            offsets.append(end)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.flat = torch.empty(max(end, 1), dtype=torch.uint8)
        with _file_system_sharing():
            self.flat.share_memory_()
        self.views: dict[str, torch.Tensor] = {}
        """The tensors by name; write the new weights into them, then send `payload`."""
        for (name, shape, dtype), offset in zip(shapes, offsets, strict=True):
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            self.views[name] = self.flat[offset : offset + num_bytes].view(dtype).view(shape)

    def copy_from(self, named: NamedTensors) -> None:
        """Copy the tensors into the segment."""
        for name, tensor in named:
            self.views[name].copy_(tensor.detach())

    def payload(self) -> str:
        """Base64 pickle that names the segment. Make one for each receiving rank: each pickle carries its own
        references to the segment, and its receiver gives them back."""
        buffer = io.BytesIO()
        with _file_system_sharing():
            ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(list(self.views.items()))
        return pybase64.b64encode(buffer.getvalue()).decode()


class _file_system_sharing:
    """Sets torch's process-wide sharing strategy for a moment, as others may rely on the default one."""

    def __enter__(self) -> None:
        _strategy_lock.acquire()
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)
        _strategy_lock.release()
