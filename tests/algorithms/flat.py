"""What the tests of token losses share: flat batches of sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fusionrl.algorithms.policy_losses import token_weights
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


def sequences_of(batch: Flat) -> Sequences:
    return Sequences(batch.index, batch.count)


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance."""
    return float((a - b).norm() / b.norm())
