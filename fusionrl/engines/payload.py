"""Payloads of `/update_weights_from_tensor`, made without importing SGLang.

SGLang unpickles a list of `(name, tensor)` with an allow-list of globals. The forms here stay within it:

* `by_value`: a plain pickle with the bytes in it. Works across hosts; the bytes travel base64-encoded by
  HTTP.
* `SharedBuffer`: the tensors as views of one shared-memory segment; the payload has its name and the offsets, and the
  receiver maps the segment once. The sharing strategy is "file_system": with torch's default "file_descriptor" the
  receiver has to ask the sender for the descriptor over a connection that needs multiprocessing's key of the
  sender, which an unrelated process lacks; that error ends the scheduler. For an engine that was started with the
  loader of `fusionrl.engines.segments` it is one tensor, the segment, and an index of what lies where.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pybase64
import torch
from torch.multiprocessing.reductions import rebuild_tensor

from fusionrl.engines.segments import index_of

NamedTensors = Sequence[tuple[str, torch.Tensor]]

_strategy_lock = threading.Lock()


def by_value(named: NamedTensors) -> str:
    """Base64 pickle that holds the tensors' bytes. Views are cloned, as a pickle takes a view's whole
    storage."""
    owned = [(name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in named]
    return pybase64.b64encode(pickle.dumps(owned, protocol=pickle.HIGHEST_PROTOCOL)).decode()


class SharedBuffer:
    """One shared-memory segment of `num_bytes`; reused from update to update.

    SGLang's ranks copy out of the segment and meet at a barrier before the request is answered: the segment
    may be written again after the answer, not before. Both ends must be on one host.
    """

    def __init__(self, num_bytes: int, slot: str = "") -> None:
        """`slot`: one that no other segment of the run's senders has. By `indexed` an engine keeps the last segment of
        each slot mapped, and alive when the sender lets it go."""
        self.slot = slot
        self.flat = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
        with _file_system_sharing():
            self.flat.share_memory_()
        self.flat.zero_()  # the pages are made now, not when the first bucket is written

    def payload(self, named: NamedTensors) -> str:
        """Base64 pickle that names the segment and where in it each of `named`, views of `flat`, lies.

        Make one for each receiving rank: each pickle carries its own reference to the segment, and its receiver gives
        that back.
        """
        buffer = io.BytesIO()
        with _file_system_sharing():
            _ViewPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(list(named))
        return pybase64.b64encode(buffer.getvalue()).decode()

    def indexed(self, named: NamedTensors) -> str:
        """As `payload`, for the load format `spec.LOADER`."""
        return self.payload([(index_of(self.slot, named, self.flat), self.flat)])


def load_payload(payload: str) -> list[tuple[str, torch.Tensor]]:
    """What a payload holds or points to; of one's own run only, as a pickle can do anything."""
    return pickle.loads(pybase64.b64decode(payload))


class _ViewPickler(ForkingPickler):
    """Pickles a storage once for all its views of one dtype; torch's own reduction does so for each."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._storages: dict[torch.dtype, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        storage = self._storages.setdefault(value.dtype, value._typed_storage())
        return rebuild_tensor, (torch.Tensor, storage, (value.storage_offset(), value.size(), value.stride(), False))


class _file_system_sharing:
    """Sets torch's process-wide sharing strategy for a moment, as others may rely on the default one."""

    def __enter__(self) -> None:
        _strategy_lock.acquire()
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)
        _strategy_lock.release()
