"""The plain policy gradient: no ratio, no clip."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions
from fusionrl.algorithms.sequences import Sequences


def policy_gradient(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-A log p`: REINFORCE (Williams, 1992), and the loss of GPG (arXiv 2504.02546).

    GPG differs from REINFORCE by its advantages, and takes the mean over all tokens. Right for samples of the policy
    that is trained; for others, multiply by `importance_weights`.
    """
    return -advantages * log_probs, {}
