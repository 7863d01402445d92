"""The rules that a family's table is made of, one for each Megatron tensor. Pure, without torch.

A rule names a Megatron tensor, the Hugging Face tensors it is made of, how they are joined, and how the result is
split over tensor-parallel ranks. Loading joins and splits; exporting gathers and takes apart (`models/convert.py`).

Megatron's names are those of the local layer spec with the numbers that layers and experts have in the whole model;
Transformer Engine's fused names are mapped onto them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from fusionrl.models.families.hf_config import HfConfig

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

Join = Literal["copy", "qkv", "concat"]
Split = Literal["replicated", "rows", "columns", "paired_rows"]
Sizes = tuple[int, ...]


class Share(NamedTuple):
    """The part of a tensor that a tensor-parallel rank holds: `slices` of its dimension `dim`, then zeros."""

    dim: int
    slices: list[slice]
    num_zeros: int = 0

    @property
    def length(self) -> int:
        """Size of the dimension without the zeros."""
        return sum(part.stop - part.start for part in self.slices)


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor.

    megatron  its name
    hf        Hugging Face name → shape, in the order of joining
    join      copy    one tensor, as it is
              qkv     query, key and value rows, interleaved by query group: (q of group 0, k 0, v 0, q of group 1, …)
              concat  one over the other: gate over up
    split     over tensor-parallel ranks: replicated; rows (dimension 0); columns (dimension 1); paired_rows (rows of
              each half of dimension 0)
    expert    number of the expert it belongs to: it stands on one expert-parallel rank, and is split over the
              expert-tensor-parallel ranks instead
    buffer    a buffer, not a parameter: nothing trains it by gradients
    optional  a folder need not have it; then it is zeros
    """

    megatron: str
    hf: Mapping[str, Sizes]
    join: Join = "copy"
    split: Split = "replicated"
    expert: int | None = None
    buffer: bool = False
    optional: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of its values."""
        return sum(prod(sizes) for sizes in self.hf.values())

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the whole Megatron tensor."""
        first, *_ = self.hf.values()
        return (sum(sizes[0] for sizes in self.hf.values()), *first[1:])

    @cached_property
    def layer(self) -> int | None:
        """Number of the decoder layer that it belongs to; None: the embedding, or what comes after the last layer."""
        match = _LAYER.match(self.megatron)
        return None if match is None else int(match[1])

    def share(self, sizes: Sizes, rank: int, size: int) -> Share:
        """Return what tensor-parallel `rank` of `size` holds of the Megatron tensor, or of one of `hf`, of these sizes.

        Zeros pad the rows where `size` does not divide them (the vocabulary).
        """
        if self.split == "replicated" or size == 1:
            return Share(0, [slice(0, sizes[0])])
        if self.split == "columns":
            width = sizes[1] // size
            return Share(1, [slice(rank * width, (rank + 1) * width)])
        # Gate over up in one tensor: a rank holds rows of both.
        num_halves = 2 if self.split == "paired_rows" and sizes[0] == self.sizes[0] else 1
        rows = sizes[0] // num_halves
        width = -(-rows // size)
        start, stop = min(rank * width, rows), min((rank + 1) * width, rows)
        slices = [slice(half * rows + start, half * rows + stop) for half in range(num_halves)]
        return Share(0, slices, width - (stop - start))


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    model_type  as config.json has it
    read        the fields of `ModelShape` that config.json gives this family; raises `ValueError` for what no trainer
                here computes, and `KeyError` for a size that is missing
    layer       rules of one decoder layer
    ignored     pattern of names that its checkpoints carry and no model here needs, added to `IGNORED`;
                {num_layers} is the number of layers
    """

    model_type: str
    read: Callable[[HfConfig], dict[str, object]]
    layer: Callable[[ModelShape, int], Iterator[Rule]]
    ignored: str | None = None


# Tensors that some checkpoints carry and no model needs: a tied output layer, and buffers of older versions.
IGNORED = r"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias"

_TE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"self_attention\.linear_q_up_proj\.layer_norm_weight$", "self_attention.q_layernorm.weight"),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_weight$", "self_attention.kv_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.linear_(fc[12])\.weight(\d+)$", r"mlp.experts.local_experts.\2.linear_\1.weight"),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def canonical_name(name: str, first_layer: int = 0, first_expert: int = 0) -> str:
    """The local spec's name of a Megatron tensor, whichever spec `name` is of, as the whole model numbers it.

    `name` is as the module of a rank has it, whose first layer and first expert have these numbers in the whole model.
    """
    for pattern, plain in _TE_NAMES:
        name = re.sub(pattern, plain, name)
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first_expert}.", name)
