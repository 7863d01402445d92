"""Weights with their adapters added, W + scale · B A: what engines get in a merged push, and folders of whole models.

Sums are in fp32 and rounded once. In bf16 a weight keeps eight bits, so that an update far smaller than the weight is
lost: `Merger.sums` has how much of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.models import convert, families
from fusionrl.models.adapters import ADAPTER, AdapterSpec, peft_module, peft_sizes, targeted_names
from fusionrl.models.hf_io import HFReader
from fusionrl.models.rules import Rule, Sizes
from fusionrl.models.shape import ModelShape
from fusionrl.weights.remote_calls import MergeSums

ReadTensor = Callable[[str, Sizes], Tensor]
"""Reads a tensor by its name and sizes."""


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return (W + scale · B A, scale · B A) in fp32.

    weight  # [..., in]
    a       # [rank, in]
    b       # [..., rank]
    """
    added = (b.float() @ a.float()).mul_(scale)
    return weight.float() + added, added


def merged_tensors(
    base: HFReader, shape: ModelShape, spec: AdapterSpec, factor: ReadTensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of a model's folder, with adapters added, in the folder's precision.

    `factor` reads a tensor of the adapters. Tensors in fp8 become bf16.
    """
    in_fp8 = base.quantization.names if base.quantization is not None else frozenset()
    targeted, sizes = targeted_names(shape, spec), peft_sizes(shape, spec)
    for name, own in families.hf_shapes(shape).items():
        if name not in base.names and name not in targeted:
            continue  # optional
        weight = base.get(name, own)
        dtype = torch.bfloat16 if name in in_fp8 else weight.dtype
        if name in targeted:
            a, b = (f"{peft_module(name)}.lora_{letter}.weight" for letter in "AB")
            weight, _ = merged(weight, factor(a, sizes[a]), factor(b, sizes[b]), spec.scale)
        yield name, weight.to(dtype)


@dataclass(frozen=True)
class Merger:
    """Adds a rank's adapters to its parts of the weights, one tensor at a time.

    adapters  Megatron name → (rule, this rank's part), as `local_adapters` lists them
    dtype     of what engines get
    sums      grow by what rounding loses of each piece
    """

    adapters: Mapping[str, tuple[Rule, Tensor]]
    scale: float
    dtype: torch.dtype
    sums: MergeSums

    def piece(self, rule: Rule, value: Tensor, place: int, size: int) -> Tensor:
        """Return `convert.piece`, with its adapter if it has one."""
        piece = convert.piece(rule, value, place, size)
        if (factors := self._factors(rule, place, size)) is None:
            return piece
        exact, added = merged(piece, *factors, self.scale)
        rounded = exact.to(self.dtype)
        if self.dtype != torch.float32:
            self.sums.lost += exact.sub_(rounded).square_().sum()
            self.sums.added += added.square_().sum()
        return rounded

    def part(self, rule: Rule, value: Tensor, size: int) -> Tensor:
        """Return this rank's part of a Megatron tensor, one of `size`, as engines get it."""
        if not any(self._factors(rule, place, size) for place in range(len(rule.hf))):
            return value if rule.is_fp32 else value.to(self.dtype)
        pieces = [self.piece(rule, value, place, size) for place in range(len(rule.hf))]
        return convert.join(rule, [piece.reshape(-1, value.size(1)).to(self.dtype) for piece in pieces], size)

    def _factors(self, rule: Rule, place: int, size: int) -> tuple[Tensor, Tensor] | None:
        """Return A and B of tensor `place` of the rule, the rows of B in the order of those of the piece."""
        prefix = rule.megatron.removesuffix(".weight") + ADAPTER
        if (held := self.adapters.get(f"{prefix}B.{place}")) is None:
            return None
        rule_of_b, b = held
        return self.adapters[f"{prefix}A.{place}"][1].detach(), convert.pieces(rule_of_b, b.detach(), size)[0]
