"""A trainer's memory on the host: further sets of weights, and what it gives away while engines use its device.

Given away, and taken back bit for bit: the buffer of weights, the optimizer's moments and its master weights. That of
gradients needs no copy, as every step begins with zeros; and with the weights NCCL gives the buffers of its process
groups away, where torch (2.13) and NCCL (2.29.7) can. On a GPU copies go to pinned host memory; on a CPU, where that
is the same memory, to a file that has no name. Every view (parameters, shards, buckets) stays valid: on a GPU each
storage is shrunk to nothing and later grown again; on a CPU, where torch does not resize what numpy has seen, the
system takes the pages back and gives empty ones later.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.base.process import give_freed_back
from fusionrl.models.shape import ModelShape
from fusionrl.plan.memory.states import BLOCK

if TYPE_CHECKING:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    from fusionrl.trainer.model import Trained

logger = logging.getLogger(__name__)


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


class WeightSet:
    """This rank's part of a set of weights, in host memory, in the model's precision.

    `weights`: (parameter or buffer of the model, its value in this set).
    """

    def __init__(self, weights: Iterable[tuple[Tensor, Tensor]]) -> None:
        memory = PinnedMemory()
        self._weights = [(param, _on_host(value.detach().to(param.dtype), param, memory)) for param, value in weights]

    @classmethod
    def of_model(cls, chunks: list[torch.nn.Module], shape: ModelShape) -> WeightSet:
        """The weights that the model has now."""
        from fusionrl.models.hf_io import local_tensors

        return cls((tensor, tensor) for _, _, tensor in local_tensors(chunks, shape))

    def rebind(self, tensors: Iterable[Tensor]) -> WeightSet:
        """Take other tensors of the same sizes for those of the model: a load makes the optimizer's anew."""
        self._weights = [(tensor, saved) for tensor, (_, saved) in zip(tensors, self._weights, strict=True)]
        return self

    def update(self) -> None:
        """Take the weights that the model has now, into the memory that the set has."""
        for param, saved in self._weights:
            if isinstance(saved, Kept):
                saved.write(param)
            else:
                saved.copy_(param.detach())

    def put_back(self) -> None:
        """Give the model these weights for good."""
        with torch.no_grad():
            for param, saved in self._weights:
                if isinstance(saved, Kept):
                    saved.read(param)
                else:
                    param.copy_(saved)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the model computes with these weights. Nothing may be trained or saved there.

        Parameters are pointed at other memory and back, so the trained weights are neither copied nor
        touched.
        """
        trained = [param.data for param, _ in self._weights]
        try:
            for param, saved in self._weights:
                param.data = _on_device(saved, param)
            yield
        finally:
            for (param, _), data in zip(self._weights, trained, strict=True):
                param.data = data


def _on_host(tensor: Tensor, param: Tensor, memory: PinnedMemory) -> Tensor | Kept:
    if param.is_cuda:
        return memory.keep(tensor.contiguous())
    return tensor.to("cpu", copy=True)  # what was read is a view of a mapped file


def _on_device(saved: Tensor | Kept, param: Tensor) -> Tensor:
    if not isinstance(saved, Kept):
        return saved
    data = torch.empty_like(param.data)
    saved.read(data)
    return data


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
        rest = self._storages(optimizer_tensors(self._trained), excluded=weights | gradients)
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
        self._resume_groups()
        restored = list[_Away]()  # which the device may still be reading
        for away in [self._weights] if only_weights else [self._weights, self._rest]:
            while away:  # what does not fit stays away
                storage, size, restore = away[-1]
                if storage.nbytes() != size:
                    storage.resize_(size)
                restore(storage)
                restored.append(away.pop())
        if restored and self._device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Within it the process groups work, whose buffers may be away with the weights; collective."""
        were_away = bool(self._suspended)
        self._resume_groups()
        yield
        if were_away:  # not after a failure, which ends the run
            self._suspended = suspend_nccl(backends_of_groups(self._device))

    def _resume_groups(self) -> None:
        while self._suspended:
            self._suspended.pop(0).resume()  # not again after a failure, which ends the run

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


def optimizer_tensors(trained: Trained) -> Iterator[torch.Tensor]:
    """Yield the fp32 master weights and what the optimizer keeps of each; views of fp32 parameters come again."""
    for inner in trained.optimizer.chained_optimizers:
        for group in [] if getattr(inner, "is_stub_optimizer", False) else inner.optimizer.param_groups:
            for param in group["params"]:
                yield param.detach()
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
