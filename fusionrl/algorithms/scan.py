"""Discounted sums over sequences of unequal lengths, without a step per token."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128


def discounted_sums(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """`y_t = x_t + decay * y_{t+1}` within each sequence, with 0 after its end.

    Sequences are cut into chunks of 128. Within a chunk the sums are one product with the matrix of powers
    `decay^(j - i)`, j >= i; what flows in from the next chunk obeys the same recursion over the chunks' first values,
    with `decay^128`, and so on: 32k tokens take three rounds.

    Args:
        values: [N], flat, one sequence after the other.
        lengths: [n] int64, their sum is N.
        decay: in 0 … 1.

    Returns:
        [N], of the type of `values`.
    """
    if not values.numel():
        return values.clone()
    device = values.device
    chunks = (lengths + CHUNK - 1).div(CHUNK, rounding_mode="floor")  # [n]
    ends = chunks.cumsum(0)
    first_slots = (ends - chunks) * CHUNK - (lengths.cumsum(0) - lengths)
    slots = torch.arange(values.numel(), device=device) + first_slots.repeat_interleave(lengths)
    grid = values.new_zeros(int(ends[-1]) * CHUNK)
    grid[slots] = values
    powers = decay ** torch.arange(CHUNK + 1, dtype=values.dtype, device=device)
    steps = torch.arange(CHUNK, device=device)
    distance = steps[:, None] - steps  # [CHUNK, CHUNK], from column i on to row j
    matrix = torch.where(distance >= 0, powers[distance.clamp(min=0)], 0.0)
    sums = grid.view(-1, CHUNK) @ matrix  # [all chunks, CHUNK]
    if int(chunks.max()) > 1:
        heads = discounted_sums(sums[:, 0], chunks, decay**CHUNK)
        inflow = heads.roll(-1)
        inflow[ends[chunks > 0] - 1] = 0.0
        sums += inflow[:, None] * powers[CHUNK - steps]
    return sums.view(-1)[slots]
