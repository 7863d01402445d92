"""Flat tokens of several samples: the trained response tokens of whole samples, and sums over sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True, eq=False)
class Responses:
    """N response tokens of n samples, flat, one sample after the other; whole ones, not a rank's part of them.

    mask     [N] bool or number: not 0 where the token is trained on, M times
    lengths  [n] int: response tokens of each sample; 0 is allowed, and so is a sample without a trained token

    Tokens that the policy did not write (a tool's answer) are not steps of it. The recursions of GAE and of returns
    run from one trained token to the next as if nothing stood between them: what comes after a tool's answer
    reaches the token before it with one factor of gamma, however long the answer is. (So do verl 0.9.1's.)
    """

    mask: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        assert self.mask.ndim == self.lengths.ndim == 1 and int(self.lengths.sum()) == self.mask.numel()

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the trained tokens among the N [M]."""
        return self.mask.nonzero()[:, 0]

    @cached_property
    def sample(self) -> Tensor:
        """The sample of each trained token [M]."""
        samples = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return samples.repeat_interleave(self.lengths.long())[self.positions]

    @cached_property
    def counts(self) -> Tensor:
        """Trained tokens of each sample [n]."""
        return self.sample.bincount(minlength=self.lengths.numel())

    @cached_property
    def last(self) -> Tensor:
        """Positions, among the M trained tokens, of the last one of each sample that has one."""
        return (self.counts.cumsum(0) - 1)[self.counts > 0]

    def pick(self, values: Tensor, name: str) -> Tensor:
        """The trained tokens' `values` [N] -> [M] float64. ValueError: one is not finite; `name` says what they are."""
        picked = values[self.positions].double()
        finite = picked.isfinite()
        if not finite.all():
            bad = int((~finite).nonzero()[0])
            sample = int(self.sample[bad])
            token = int(self.positions[bad] - self.lengths[:sample].sum())
            raise ValueError(f"{name} {float(picked[bad])} at response token {token} of sample {sample} is not finite")
        return picked

    def pick_rewards(self, rewards: Tensor) -> Tensor:
        """As `pick`, of rewards [N]. ValueError also for one on an untrained token, where it would be lost."""
        picked = self.pick(rewards, "reward")
        lost = int(rewards.count_nonzero()) - int(picked.count_nonzero())
        if lost:
            raise ValueError(f"{lost} rewards stand on tokens that are not trained on; put them on trained tokens")
        return picked

    def place(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` [M] at their tokens, 0 at the others -> [N]."""
        placed = torch.zeros(self.mask.numel(), dtype=dtype, device=values.device)
        placed[self.positions] = values.to(dtype)
        return placed

    def spread(self, values: Tensor) -> Tensor:
        """`values` [n] of samples to their trained tokens, 0 to the others -> [N]."""
        return self.place(values[self.sample], values.dtype)

    def mean(self, values: Tensor, name: str) -> Tensor:
        """Mean of `values` [N] over each sample's trained tokens, as `pick` -> [n] float64; NaN without one."""
        sums = torch.zeros(self.lengths.numel(), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.sample, self.pick(values, name)) / self.counts
