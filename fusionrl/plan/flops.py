"""FLOPs of the optimizer steps, of the matrix products alone: the numerator of `perf/mfu`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusionrl.models.shape import ModelShape
from fusionrl.plan.balance import ImageCost, SequenceCost
from fusionrl.plan.devices import KINDS


@dataclass(frozen=True)
class Work:
    """Sequences that are trained on: the tokens of each, prompts included, and those of each different image."""

    lengths: tuple[int, ...] = ()
    images: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Iterable[int], images: Iterable[int] = ()) -> Work:
        """Of sequences with these numbers of tokens, and different images with these."""
        return cls(tuple(lengths), tuple(images))

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(self.lengths)


def train_flops(shape: ModelShape, work: Work, images: ImageCost | None = None) -> float:
    """FLOPs of the optimizer steps on these sequences, each of which is trained on once; `images`: of their images."""
    of_images = 0.0 if images is None else sum(map(images, work.images))
    return float(SequenceCost.of_shape(shape)(work.lengths).sum()) + of_images


def peak_flops(name: str, memory_bytes: float | None = None) -> float | None:
    """Dense bf16 FLOP a second of a GPU by its driver's name ("NVIDIA H100 80GB HBM3"); None: it is in no table.

    memory_bytes  tells kinds of one name apart
    """
    words = name.lower().replace("-", " ").replace("rtx ", "rtx").split()
    if {"pcie", "nvl"} & set(words):  # other figures than the boards that the table has
        return None
    kinds = [kind for short, kind in ((kind.partition("-")[0], kind) for kind in KINDS) if short in words]
    if memory_bytes is not None:
        kinds.sort(key=lambda kind: abs(KINDS[kind].memory - memory_bytes))
    return KINDS[kinds[0]].peak if kinds else None
