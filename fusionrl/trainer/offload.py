"""Give a trainer's memory away while engines generate on the same device, and take it back bit for bit.

What is copied out: the buffers of weights and gradients, the optimizer's moments and its master weights; with the
weights NCCL gives the buffers of its process groups away, where torch (2.13) and NCCL (2.29) can. On a GPU they
go to pinned host memory; on a CPU, where that is the same memory, to a file that has no name. Every view of it
(parameters, shards, buckets) stays valid: on a GPU each storage is shrunk to nothing and later grown again;
on a CPU, where torch does not resize what numpy has seen, the system takes the pages back and gives empty ones later.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from fusionrl.trainer.model import Trained

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

logger = logging.getLogger(__name__)


class _Copy(Protocol):
    def restore(self, storage: torch.UntypedStorage) -> None:
        """Fill `storage`, which has its size again, with what was copied."""


class _PinnedCopy:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._bytes = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._bytes.copy_(_as_bytes(storage), non_blocking=True)

    def restore(self, storage: torch.UntypedStorage) -> None:
        _as_bytes(storage).copy_(self._bytes, non_blocking=True)


class _FileCopy:
    def __init__(self, storage: torch.UntypedStorage, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `restore`, or with this object)
        self._file.write(_host_bytes(storage))
        self._file.flush()

    def restore(self, storage: torch.UntypedStorage) -> None:
        self._file.seek(0)
        view = _host_bytes(storage)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError("the file of offloaded memory is shorter than what was written")
            done += count
        self._file.close()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage) -> memoryview:
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class Offload:
    """The memory of `trained`, either where it belongs or copied out.

    Args:
        trained: what is trained.
        device: where its memory is.
        folder: of the files, on a CPU; the system's if None.
    """

    def __init__(self, trained: Trained, device: torch.device, folder: str | None = None) -> None:
        self._trained, self._device, self._folder = trained, device, folder
        self._suspended = False  # whether process groups gave their buffers away
        # What is copied out: (storage, its size, the copy), of weights and of the rest.
        self._weights: list[tuple[torch.UntypedStorage, int, _Copy]] = []
        self._rest: list[tuple[torch.UntypedStorage, int, _Copy]] = []

    def offload(self, *, keep_weights: bool = False) -> int:
        """Copy out and give the memory back; what is away already stays so.

        Args:
            keep_weights: they are still needed, to be pushed.

        Returns:
            Bytes copied out now.
        """
        weights = self._storages(self._weight_buffers())
        rest = self._storages(self._everything(), besides=weights)
        copied = 0 if self._rest else self._copy_out(rest.values(), self._rest)
        if not keep_weights and not self._weights:
            copied += self._copy_out(weights.values(), self._weights)
            self._set_groups("suspend")
        if copied and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return copied

    def _copy_out(
        self, storages: Iterable[torch.UntypedStorage], away: list[tuple[torch.UntypedStorage, int, _Copy]]
    ) -> int:
        on_gpu = self._device.type == "cuda"
        copies: list[tuple[torch.UntypedStorage, int, _Copy]] = []
        for storage in storages:
            copy: _Copy = _PinnedCopy(storage) if on_gpu else _FileCopy(storage, self._folder)
            copies.append((storage, storage.nbytes(), copy))
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
        self._set_groups("resume")
        if not only_weights:
            away, self._rest = away + self._rest, []
        for storage, size, copy in away:
            if storage.nbytes() != size:
                storage.resize_(size)
            copy.restore(storage)
        if away and self._device.type == "cuda":
            torch.cuda.synchronize()

    def _set_groups(self, verb: str) -> None:
        """Suspend the communicators of all process groups, or resume those that were suspended."""
        if self._device.type != "cuda" or (verb == "resume" and not self._suspended):
            return
        self._suspended = False
        for group in list(dist.distributed_c10d._world.pg_map):
            method = getattr(group._get_backend(self._device), verb, None)
            try:
                if method is None:
                    raise NotImplementedError(f"torch {torch.__version__} has none")
                method()
            except (NotImplementedError, RuntimeError) as error:
                if verb == "resume":
                    raise
                logger.info("process groups keep their buffers: they cannot be suspended (%s)", error)
                return
            self._suspended = self._suspended or verb == "suspend"

    def _storages(
        self, tensors: Iterable[torch.Tensor], besides: Container[int] = ()
    ) -> dict[int, torch.UntypedStorage]:
        """Address → storage, of those on the device that are not among `besides`."""
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device.type)
        return {s.data_ptr(): s for s in storages if s.nbytes() and s.data_ptr() not in besides}

    def _weight_buffers(self) -> Iterator[torch.Tensor]:
        return (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)

    def _buffers(self) -> Iterator[_ParamAndGradBuffer]:
        return (b for chunk in self._trained.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _everything(self) -> Iterator[torch.Tensor]:
        for buffer in self._buffers():
            yield buffer.grad_data
        for inner in self._trained.optimizer.chained_optimizers:
            if getattr(inner, "is_stub_optimizer", False):
                continue
            for group in inner.optimizer.param_groups:
                for param in group["params"]:
                    yield param.data
                    yield from _tensors_of(inner.optimizer.state[param])


def _tensors_of(state: Mapping[str, object]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _drop_pages(storage: torch.UntypedStorage) -> None:
    """Give the whole pages within a host storage back to the system; they read as zeros when they are next touched."""
    page = mmap.PAGESIZE
    first = -(-storage.data_ptr() // page) * page
    last = (storage.data_ptr() + storage.nbytes()) // page * page
    if last > first:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")
