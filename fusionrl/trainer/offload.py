"""Give a trainer's memory away while engines generate on the same device, and take it back bit for bit.

Copied to the host: the buffer of weights, the optimizer's moments and its master weights. That of gradients is given
away without a copy, as every step begins with zeros; and with the weights NCCL gives the buffers of its process groups
away, where torch (2.13) and NCCL (2.29.7) can. On a GPU copies go to pinned host memory; on a CPU, where that is the
same memory, to a file that has no name. Every view (parameters, shards, buckets) stays valid: on a GPU each storage is
shrunk to nothing and later grown again; on a CPU, where torch does not resize what numpy has seen, the system takes
the pages back and gives empty ones later.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from fusionrl.base.process import give_freed_back
from fusionrl.trainer.model import Trained
from fusionrl.trainer.pinned_memory import PinnedMemory

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer


logger = logging.getLogger(__name__)


Backend: TypeAlias = Any  # torch's of a process group; it has `suspend` and `resume`, which are collective, since 2.13


def suspend_nccl(backends: Iterable[Backend]) -> list[Backend]:
    """Suspend the NCCL backends among these, in order, and return them; [] where the first cannot be.

    Every rank must meet its groups in the order in which they were made. The groups that carry Python objects are
    gloo's, which has no memory on a device and refuses to be suspended, or resumed.
    """
    suspended = []
    for backend in backends:
        if backend.name() != "nccl":
            continue
        try:
            backend.suspend()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            logger.info("process groups keep their buffers: they cannot be suspended (%s)", error)
            break
        suspended.append(backend)
    return suspended


def backends_of_groups(device: torch.device) -> Iterator[Backend]:
    """The backends for `device` of all process groups of this process, in the order in which they were made."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group without one for this device
            yield group._get_backend(device)


# Fills a storage, which has its size again, with what was copied.
_Restore = Callable[[torch.UntypedStorage], object]
_Away = tuple[torch.UntypedStorage, int, _Restore]  # with its size


def _copied_to_pinned(storage: torch.UntypedStorage, memory: PinnedMemory) -> _Restore:
    copy = memory.keep(_as_bytes(storage))
    return lambda grown: copy.read(_as_bytes(grown))


def _copied_to_file(storage: torch.UntypedStorage, folder: str | None) -> _Restore:
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `restore`, or with it)
    file.write(_host_bytes(storage))
    file.flush()

    def restore(storage: torch.UntypedStorage) -> None:
        file.seek(0)
        view = _host_bytes(storage)
        if file.readinto(view) != len(view):
            raise OSError("the file of offloaded memory is shorter than what was written")
        file.close()

    return restore


def _zero(storage: torch.UntypedStorage) -> None:
    """Without a copy: every step begins with gradients of zero."""
    _as_bytes(storage).zero_()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class Offload:
    """The memory of `trained` on `device`, either where it belongs or copied out.

    On a CPU into files in `folder`; the system's if None.
    """

    def __init__(self, trained: Trained, device: torch.device, folder: str | None = None) -> None:
        self._trained, self._device, self._folder = trained, device, folder
        self._suspended: list[Backend] = []
        self._weights: list[_Away] = []
        self._rest: list[_Away] = []

    def offload(self, *, keep_weights: bool = False) -> int:
        """Copy out and give the memory back, with `keep_weights` not theirs; what is away already stays so.

        Returns the bytes given away now, those of the gradients included.
        """
        buffers = self._buffers()
        trained = (buffer.param_data for buffer in buffers if buffer.param_data is not None)
        weights = self._storages(itertools.chain(trained, self._frozen()))
        gradients = self._storages((buffer.grad_data for buffer in buffers), excluded=weights)
        rest = self._storages(self._optimizer_states(), excluded=weights | gradients)
        num_bytes = 0 if self._rest else self._copy_out(rest.values(), gradients.values(), self._rest)
        if not keep_weights and not self._weights:
            num_bytes += self._copy_out(weights.values(), (), self._weights)
            if self._device.type == "cuda" and not self._suspended:
                self._suspended = suspend_nccl(backends_of_groups(self._device))
        if num_bytes and self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif num_bytes:
            give_freed_back()
        return num_bytes

    def _copy_out(
        self,
        storages: Iterable[torch.UntypedStorage],
        blank: Iterable[torch.UntypedStorage],
        away: list[_Away],
    ) -> int:
        """Give `storages` away with a copy, and `blank` ones without."""
        on_gpu, memory = self._device.type == "cuda", PinnedMemory()
        copies: list[_Away] = []
        for storage in storages:
            restore = _copied_to_pinned(storage, memory) if on_gpu else _copied_to_file(storage, self._folder)
            copies.append((storage, storage.nbytes(), restore))
        copies += [(storage, storage.nbytes(), _zero) for storage in blank]
        if on_gpu:
            torch.cuda.synchronize()
        # Only now, so that a full disk or host leaves everything where it was.
        for storage, _, _ in copies:
            if on_gpu:
                storage.resize_(0)
            else:
                _drop_pages(storage)
        away += copies
        return sum(size for _, size, _ in copies)

    def reload(self, *, only_weights: bool = False) -> None:
        """Take the memory back (the weights' alone, if asked for); nothing where it is there."""
        away, self._weights = self._weights, []
        while self._suspended:
            self._suspended.pop(0).resume()  # not again after a failure, which ends the run
        if not only_weights:
            away, self._rest = away + self._rest, []
        for storage, size, restore in away:
            if storage.nbytes() != size:
                storage.resize_(size)
            restore(storage)
        if away and self._device.type == "cuda":
            torch.cuda.synchronize()

    def _storages(
        self, tensors: Iterable[torch.Tensor], excluded: Container[int] = ()
    ) -> dict[int, torch.UntypedStorage]:
        """Address → storage, of those on the device that are not `excluded`."""
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device.type)
        return {s.data_ptr(): s for s in storages if s.nbytes() and s.data_ptr() not in excluded}

    def _buffers(self) -> list[_ParamAndGradBuffer]:
        return [b for chunk in self._trained.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _frozen(self) -> Iterator[torch.Tensor]:
        """Weights that are in no buffer."""
        parameters = (param for chunk in self._trained.chunks for param in chunk.parameters())
        return (param.data for param in parameters if not param.requires_grad)

    def _optimizer_states(self) -> Iterator[torch.Tensor]:
        for inner in self._trained.optimizer.chained_optimizers:
            if getattr(inner, "is_stub_optimizer", False):
                continue
            for group in inner.optimizer.param_groups:
                for param in group["params"]:
                    yield param.data
                    yield from (x for x in inner.optimizer.state[param].values() if isinstance(x, torch.Tensor))


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Give the whole pages within a host storage back to the system; they read as zeros when they are next touched."""
    page = mmap.PAGESIZE
    first = -(-storage.data_ptr() // page) * page
    last = (storage.data_ptr() + storage.nbytes()) // page * page
    if last > first:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")
