"""Further sets of weights for one model (reference, teacher, an older policy), lent to it for forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusionrl.models.hf_io import local_tensors, read_local_weights
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.pinned_memory import Kept, PinnedMemory


class WeightSet:
    """This rank's part of a set of weights, in host memory, in the model's precision.

    Raises:
        ValueError: the folder's weights do not fit the model; names `flag`.
    """

    def __init__(self, folder: str, chunks: list[torch.nn.Module], shape: ModelShape, flag: str) -> None:
        memory = PinnedMemory()
        self._weights: list[tuple[Tensor, Tensor | Kept]] = [
            (param, _on_host(tensor.to(param.dtype), param, memory))
            for param, tensor in read_local_weights(folder, chunks, shape, flag)
        ]

    @classmethod
    def of_model(cls, chunks: list[torch.nn.Module], shape: ModelShape) -> WeightSet:
        """The weights that the model has now."""
        weights, memory = cls.__new__(cls), PinnedMemory()
        weights._weights = [
            (tensor, _on_host(tensor.detach(), tensor, memory)) for _, _, tensor in local_tensors(chunks, shape)
        ]
        return weights

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
