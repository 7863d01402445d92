"""MXFP4 (OCP Microscaling Formats v1.0) as gpt-oss is published in it: two values of four bits a byte, and a scale, a
power of two, for 32 values. Trainers read it, and hold, push and save what it means.
"""

import torch
from torch import Tensor

# e2m1: a sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of a scale's exponent


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n], uint8 → fp32 [..., 32 n], exactly; of a byte the lower half is first."""
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = torch.tensor(_VALUES, device=blocks.device)[halves.int()]
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2)
