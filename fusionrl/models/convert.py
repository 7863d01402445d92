"""Hugging Face tensors into Megatron's and back, by the rules of a family's table.

`split(join(tensors))` is what a tensor-parallel rank loads; `take_apart(gather(parts))` what is exported.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionrl.models.families import Rule
from fusionrl.models.rules import Share


def join(rule: Rule, tensors: Sequence[Tensor], size: int = 1) -> Tensor:
    """The Megatron tensor made of `tensors`, which are in the order of `rule.hf`.

    They are whole, or the parts that one of `size` tensor-parallel ranks holds of each.
    """
    first = tensors[0].t() if rule.transposed else tensors[0]
    if rule.join == "copy":
        return first
    if rule.join == "interleaved":
        return torch.cat([first[0::2], first[1::2]])
    if rule.join == "concat":
        return torch.cat(list(tensors))
    groups, rest = rule.groups // size, tensors[0].shape[1:]
    sections = (
        section.reshape(groups, -1, *rest)
        for name, tensor in zip(rule.hf, tensors, strict=True)
        for section in tensor.split([rows // size for rows in rule.section_rows(name)])
    )
    return torch.cat(list(sections), dim=1).reshape(-1, *rest)


def take_apart(rule: Rule, full: Tensor) -> list[Tensor]:
    """The Hugging Face tensors of a whole Megatron tensor, in `rule.hf`'s order; the inverse of `join`."""
    views = pieces(rule, full)
    return [view.reshape(-1, *full.shape[1:]) for view in views] if rule.join == "grouped" else views


def pieces(rule: Rule, part: Tensor, size: int = 1) -> list[Tensor]:
    """Return `rule.hf` in `part`: the values of each in order; of a grouped join not in its shape.

    Views, but for a tensor of several sections or of interleaved rows, which is a copy. `part` is whole, or what one of
    `size` tensor-parallel ranks holds of the tensor.
    """
    if rule.join == "interleaved":
        part = torch.stack(part.chunk(2), 1).flatten(0, 1)
    if rule.join in ("copy", "interleaved"):
        return [part.t() if rule.transposed else part]
    if rule.join == "concat":
        return list(part.split([sizes[0] // size for sizes in rule.hf.values()]))
    rows = [[section // rule.groups for section in rule.section_rows(name)] for name in rule.hf]
    rest = part.shape[1:]
    of_groups = part.reshape(rule.groups // size, -1, *rest)
    tensors = of_groups.split([sum(sections) for sections in rows], dim=1)
    return [
        tensor if len(sections) == 1 else torch.cat([x.reshape(-1, *rest) for x in tensor.split(sections, dim=1)])
        for tensor, sections in zip(tensors, rows, strict=True)
    ]


def piece(rule: Rule, part: Tensor, place: int, size: int = 1) -> Tensor:
    """Return the one of `pieces` at `place`."""
    return pieces(rule, part, size)[place]


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
    share = rule.share(rank, size)
    return joined(views(full, share), share)


def fill(rule: Rule, full: Tensor, part: Tensor, rank: int, size: int, name: str | None = None) -> None:
    """Copy `part`, the values of `rank` in order and without zeros at the end, into its places in `full`.

    `full` is the Megatron tensor, or the tensor `name` of `rule.hf`, and keeps its precision.
    """
    places = views(full, rule.share(rank, size, name))
    parts = part.split([place.size(0) for place in places]) if len(places) > 1 else [part]
    for place, values in zip(places, parts, strict=True):
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
        num_zeros = rule.share(rank, len(parts)).num_zeros
        fill(rule, full, part[: part.size(0) - num_zeros], rank, len(parts))
    return full
