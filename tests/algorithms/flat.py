"""What the tests of token losses share: flat batches of sequences, and two pretend context-parallel ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fusionrl.algorithms.aggregation import token_weights
from fusionrl.algorithms.sequences import Sequences

LENGTHS = (5, 1, 0, 7, 3, 4)  # one is empty, and the last fully masked


@dataclass
class Flat:
    """Tokens [N] of sequences, all fp64."""

    index: Tensor
    position: Tensor
    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    selected: Tensor
    count: int = len(LENGTHS)

    def pick(self, tokens: Tensor) -> Flat:
        """Of some tokens (bool or indices); the weights stay what they are."""
        picked = {f.name: getattr(self, f.name)[tokens] for f in fields(self) if f.name != "count"}
        return replace(self, **picked)

    def renumbered(self) -> Flat:
        """With the sequences that have tokens as 0 … S - 1, as a micro-batch of its own."""
        present, index = self.index.unique(return_inverse=True)
        return replace(self, index=index, count=len(present))


def flat_batch(seed: int, kind: str = "sequence_mean", token_advantages: bool = False, spread: float = 0.4) -> Flat:
    """A random batch with masked tokens; `kind` as of `token_weights`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    lengths = torch.tensor(LENGTHS)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    size = len(index)
    mask = (torch.rand(size, generator=generator) < 0.8).double()
    mask[index == len(LENGTHS) - 1] = 0
    old = normal(size) - 2
    weights = torch.zeros(size, dtype=torch.float64)
    for s in range(len(LENGTHS)):
        own = mask[index == s].numpy()
        weights[index == s] = torch.from_numpy(token_weights(own, kind, float(mask.sum()), len(LENGTHS), 7.0))
    return Flat(
        index=index,
        position=torch.cat([torch.arange(n) for n in LENGTHS]),
        log_probs=old + spread * normal(size),
        old=old,
        advantages=normal(size) if token_advantages else normal(len(LENGTHS))[index],
        mask=mask,
        weights=weights,
        selected=torch.rand(size, generator=generator) < 0.3,
    )


class _RankSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TwoRanks, rank: int) -> Tensor:
        ctx.ranks, ctx.rank = ranks, rank
        return ranks.add(x, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.add(grad, ctx.rank), None, None


class TwoRanks:
    """Two threads whose `reduce` adds their tensors up, forward and backward, as a context-parallel group does."""

    def __init__(self) -> None:
        self._slots: list[Tensor] = [torch.zeros(0), torch.zeros(0)]
        self._barrier = threading.Barrier(2, timeout=30)
        self.sums = 0

    def add(self, x: Tensor, rank: int) -> Tensor:
        self._slots[rank] = x
        self._barrier.wait()
        total = self._slots[0] + self._slots[1]
        self.sums += rank == 0
        self._barrier.wait()
        return total

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        """`work(rank, reduce)` on both; an error of either is raised here."""
        results: list[Any] = [None, None]
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank, lambda x: _RankSum.apply(x, self, rank))
            except BaseException as error:  # handed to the test's thread
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def sequences_of(batch: Flat, reduce: Callable[[Tensor], Tensor] | None = None) -> Sequences:
    return Sequences(batch.index, batch.count, reduce)


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    return float((a - b).norm() / b.norm())
