"""Values of tensors from one form into another: Hugging Face's and Megatron's, and low precision.

By the rules of a family's table `split(join(tensors))` is what a tensor-parallel rank loads, and
`take_apart(gather(parts))` what is exported.

Block-wise fp8: a block's scale is its largest |value| / 448, the largest number of float8_e4m3fn, so that no value is
cut off and one is exact; with ue8m0 the next power of two (DeepSeek-V3, arXiv:2412.19437, 3.3; DeepSeek-V3.1 for
ue8m0). MXFP4 (OCP Microscaling Formats v1.0), in which gpt-oss is published, is read only.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusionrl.models.families import Rule
from fusionrl.models.quantization import SCALE, BlockFp8
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


LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CHUNK = 2**24  # values in fp32 at a time


def quantize(weight: Tensor, block: tuple[int, int], ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """`weight` [rows, columns] as float8_e4m3fn values of its shape, and fp32 scales [⌈rows/b₀⌉, ⌈columns/b₁⌉].

    Value times scale is the weight, off by at most 1/16 of it (half a step of the three bits of the mantissa), or, for
    values under 2⁻⁶ of the scale, by 2⁻¹⁰ of the scale. A block of zeros has scale 1; one with a NaN or an infinity
    comes out as NaN.
    """
    rows_at_once = max(1, _CHUNK // weight.size(1) // block[0]) * block[0]
    parts = [_quantize(part, block, ue8m0) for part in weight.split(rows_at_once)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def _quantize(weight: Tensor, block: tuple[int, int], ue8m0: bool) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.view(padded.size(0) // block[0], block[0], padded.size(1) // block[1], block[1])
    scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    if ue8m0:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
        powers = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
        scales = torch.where(scales.isfinite() & (scales > 0), powers, scales)
    scales = torch.where(scales == 0, 1.0, scales)
    # Division may round to just above the largest number, which fp8 turns into NaN.
    values = (blocks / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()


def dequantize(values: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """fp32 weights [rows, columns] of `values`, whose first row and column are numbers `first` of the whole weight;
    `scales` are the whole weight's."""
    rows = torch.arange(first[0], first[0] + values.size(0), device=values.device) // block[0]
    columns = torch.arange(first[1], first[1] + values.size(1), device=values.device) // block[1]
    return values.float() * scales.float()[rows][:, columns]


def quantized(tensors: Iterable[tuple[str, Tensor]], spec: BlockFp8 | None) -> Iterator[tuple[str, Tensor]]:
    """Yield what an engine is sent for (name, full tensor): for an fp8 weight its values, then their scales."""
    for name, tensor in tensors:
        if spec is None or name not in spec.names:
            yield name, tensor
            continue
        values, scales = quantize(tensor, spec.block, spec.ue8m0)
        yield name, values
        yield name + SCALE, scales


def held(tensors: Iterable[tuple[str, Tensor]], spec: BlockFp8 | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an engine's checksum covers: for an fp8 weight its value in bf16, without scales."""
    for name, tensor in tensors:
        if spec is not None and name in spec.names:
            values, scales = quantize(tensor, spec.block, spec.ue8m0)
            tensor = dequantize(values, scales, spec.block).bfloat16()
        yield name, tensor


# e2m1: a sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of a scale's exponent


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n], uint8 → fp32 [..., 32 n], exactly; of a byte the lower half is first."""
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = torch.tensor(_VALUES, device=blocks.device)[halves.int()]
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2)
