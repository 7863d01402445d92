"""CISPO: the ratio is clipped, no token's gradient is lost. MiniMax-M1, arXiv 2506.13585."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions, bounded_exp
from fusionrl.algorithms.sequences import Sequences


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-sg[clip(r, 1 - eps_low, 1 + eps_high)] * A * log p`, equations 4 and 5; sg stops the gradient.

    The paper leaves the range open below: eps_low of 1 or more.
    """
    ratio = bounded_exp((log_probs - old_log_probs).detach())
    weight = ratio.clamp(1.0 - options.eps_low, 1.0 + options.eps_high)
    return -weight * advantages * log_probs, {"clip_fraction": (weight != ratio).to(ratio.dtype)}
