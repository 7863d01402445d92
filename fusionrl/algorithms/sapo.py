"""SAPO: a smooth gate in place of the clip. Soft Adaptive Policy Optimization, arXiv 2511.20347."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions, bounded_exp
from fusionrl.algorithms.sequences import Sequences


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-A * 4 / tau * sigmoid(tau (r - 1))`, with tau by the sign of the advantage.

    The gradient is that of `-A r` times the gate `4 s (1 - s)`, s the sigmoid: 1 at r = 1, and less the further the
    ratio is from it. The metric `gate` is its mean. The paper's objective is the mean over sequences.
    """
    ratio = bounded_exp(log_probs - old_log_probs)
    tau = torch.where(advantages > 0, ratio.new_tensor(options.sapo_tau_pos), ratio.new_tensor(options.sapo_tau_neg))
    sigmoid = torch.sigmoid(tau * (ratio - 1.0))
    return -advantages * sigmoid * 4.0 / tau, {"gate": 4.0 * sigmoid * (1.0 - sigmoid)}
