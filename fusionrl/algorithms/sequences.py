"""Sums over sequences whose tokens stand flat in one tensor, and may be spread over context-parallel ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Index of the sequence, among `count` S, to which each of N tokens belongs.

    Example: two sequences of 2 and 3 tokens have index [0, 0, 1, 1, 1] and count 2. A sequence may have no token here:
    all are masked, or they are on another rank.

    index   [N] int64, each 0 … S - 1, in any order
    count   S, the same on all context-parallel ranks
    reduce  the sum of a [S] tensor over the context-parallel ranks, differentiable (its backward is also that sum);
            None where all tokens are here. All ranks must call it equally often.
    """

    index: Tensor
    count: int
    reduce: Callable[[Tensor], Tensor] | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Sum of each sequence, added up in fp64; 0 for one without tokens. [N] -> [S], in the type of `x`"""
        total = x.new_zeros(self.count, dtype=torch.float64).index_add(0, self.index, x.double())
        return (self.reduce(total) if self.reduce is not None else total).to(x.dtype)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mean of each sequence over its tokens, weighted by `mask`; 0 for one without. [N], [N] -> [S]

        A token whose mask is 0 counts nothing even where its value is NaN or infinite.
        """
        mask = mask.to(x.dtype)
        weight = self.sum(mask)
        total = self.sum(torch.where(mask > 0, x, 0.0) * mask)
        return total / torch.where(weight > 0, weight, 1.0)

    def spread(self, y: Tensor) -> Tensor:
        """To each token the value of its sequence. [S] -> [N]"""
        # Each device has one form whose gradient adds in a fixed order: threads and blocks race in the other one.
        return y.index_select(0, self.index) if y.device.type == "cpu" else y[self.index]
