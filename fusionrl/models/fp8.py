"""Block-wise fp8, as an engine keeps the weights that its checkpoint has in it: to it from full precision, and back.

A block's scale is its largest |value| / 448, the largest number of float8_e4m3fn, so that no value is cut off and one
is exact; with ue8m0 the next power of two (DeepSeek-V3, arXiv:2412.19437, 3.3; DeepSeek-V3.1 for ue8m0).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusionrl.models.quantization import SCALE, BlockFp8

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
