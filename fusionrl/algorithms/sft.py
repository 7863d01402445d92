"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions
from fusionrl.algorithms.sequences import Sequences


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross entropy of each token against the text: `-log p(token)`. [t] -> [t]"""
    return -log_probs


def cross_entropy(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`sft_loss` as a policy loss, which asks for nothing but `log_probs`."""
    return sft_loss(log_probs), {}
