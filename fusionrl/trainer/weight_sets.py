"""Further sets of weights for one model (reference, teacher, an older policy), lent to it for forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusionrl.models.hf_io import local_tensors
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.pinned_memory import Kept, PinnedMemory


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
