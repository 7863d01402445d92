"""Hugging Face tensors into Megatron's and back, by the rules of a family's table.

`split(join(tensors))` is what a tensor-parallel rank loads; `take_apart(gather(parts))` what is exported.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionrl.models.families import Rule
from fusionrl.models.families.rules import Share
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


def views(tensor: Tensor, share: Share) -> list[Tensor]:
    """Return the parts of a whole tensor that a rank holds."""
    return [tensor.narrow(share.dim, part.start, part.stop - part.start) for part in share.slices]


def joined(parts: Sequence[Tensor], share: Share) -> Tensor:
    """Return as one tensor what a rank holds, given the parts that `views` returns; zeros at its end included."""
    if share.num_zeros:
        parts = [*parts, parts[0].new_zeros(share.num_zeros, *parts[0].shape[1:])]
    return torch.cat(list(parts), share.dim) if len(parts) > 1 else parts[0]


def split(rule: Rule, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds."""
    share = rule.share(tuple(full.shape), rank, size)
    return joined(views(full, share), share)


def fill(rule: Rule, full: Tensor, part: Tensor, rank: int, size: int) -> None:
    """Copy `part`, the values of `rank` in order and without zeros at the end, into its places in `full`.

    `full` is the Megatron tensor or one of `rule.hf`, and keeps its precision.
    """
    places = views(full, rule.share(tuple(full.shape), rank, size))
    for place, values in zip(places, part.chunk(len(places)), strict=True):
        copy_values(place, values)


def copy_values(target: Tensor, values: Tensor) -> None:
    """Copy `values` in order. If their shape differs, `target` must be contiguous; so none of them moves twice."""
    (target if target.shape == values.shape else target.view(values.shape)).copy_(values)


def gather(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The whole Megatron tensor of all ranks' parts, without zeros at the end; inverse of `split`."""
    if rule.split == "replicated" or len(parts) == 1:
        return parts[0]
    full = parts[0].new_empty(rule.sizes)
    for rank, part in enumerate(parts):
        num_zeros = rule.share(rule.sizes, rank, len(parts)).num_zeros
        fill(rule, full, part[: part.size(0) - num_zeros], rank, len(parts))
    return full
