"""GMPO: the geometric mean of a sequence's clipped ratios. Geometric-Mean Policy Optimization, arXiv 2507.20673."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions, bounded_exp
from fusionrl.algorithms.sequences import Sequences


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """At each token `-A * exp(mean over the sequence of the clipped log ratios)`, A the mean advantage of the sequence.

    Each token's ratio is clipped by itself, to exp(-eps_low) … exp(eps_high) (the range is one of logarithms here)
    and as in PPO only on the side that its advantage wants. The paper's objective is the mean over sequences.
    """
    log_ratio = log_probs - old_log_probs
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=options.eps_high), log_ratio.clamp(min=-options.eps_low))
    ratio = bounded_exp(sequences.mean(bounded, mask))
    loss = -sequences.mean(advantages, mask) * ratio
    return sequences.spread(loss), {"clip_fraction": (bounded != log_ratio).to(log_ratio.dtype)}
