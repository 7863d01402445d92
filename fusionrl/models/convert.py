"""Hugging Face tensors into Megatron's and back, by the rules of a family's table.

`split(join(tensors))` is what a tensor-parallel rank loads; `take_apart(gather(parts))` what is exported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionrl.models.families import Rule
from fusionrl.models.shape import ModelShape


def join(rule: Rule, tensors: Sequence[Tensor], shape: ModelShape, size: int = 1) -> Tensor:
    """The Megatron tensor made of `tensors`, which are in the order of `rule.hf`.

    They are whole, or the parts that one of `size` tensor-parallel ranks holds of each.
    """
    if rule.join == "copy":
        return tensors[0]
    if rule.join == "concat":
        return torch.cat(list(tensors))
    groups, rest = shape.num_query_groups // size, tensors[0].shape[1:]
    return torch.cat([x.reshape(groups, -1, *rest) for x in tensors], dim=1).reshape(-1, *rest)


def take_apart(rule: Rule, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """The Hugging Face tensors of a whole Megatron tensor, in `rule.hf`'s order; the inverse of `join`."""
    views = pieces(rule, full, shape)
    return [view.reshape(-1, *full.shape[1:]) for view in views] if rule.join == "qkv" else views


def pieces(rule: Rule, part: Tensor, shape: ModelShape, size: int = 1) -> list[Tensor]:
    """Return views of `rule.hf` in `part`: the values of each in order, for query, key and value not in its shape.

    `part` is whole, or what one of `size` tensor-parallel ranks holds of the tensor.
    """
    if rule.join == "copy":
        return [part]
    if rule.join == "concat":
        return list(part.split([sizes[0] // size for sizes in rule.hf.values()]))
    groups, rest, d = shape.num_query_groups // size, part.shape[1:], shape.head_dim
    per_group = shape.num_attention_heads // shape.num_query_groups
    return list(part.reshape(groups, (per_group + 2) * d, *rest).split([per_group * d, d, d], dim=1))


def split(rule: Rule, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds.

    Rows are padded with zeros where `size` does not divide them (the vocabulary).
    """
    if rule.split == "replicated" or size == 1:
        return full
    if rule.split == "columns":
        return full.chunk(size, dim=1)[rank]
    if rule.split == "paired_rows":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    rows = -(-full.size(0) // size)
    part = full[rank * rows : (rank + 1) * rows]
    if part.size(0) < rows:
        part = torch.cat([part, part.new_zeros(rows - part.size(0), *part.shape[1:])])
    return part


def gather(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The whole Megatron tensor of all ranks' parts, without padding; inverse of `split`."""
    if rule.split == "replicated":
        return parts[0]
    if rule.split == "columns":
        return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
    if rule.split == "paired_rows" and len(parts) > 1:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    full = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return full[: sum(sizes[0] for sizes in rule.hf.values())]
