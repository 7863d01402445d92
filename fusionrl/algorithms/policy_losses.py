"""The functions of all policy losses (`losses.py`), made safe against log-probs that are not numbers."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from fusionrl.algorithms.losses import LOSSES
from fusionrl.algorithms.policy_loss import PolicyLoss, PolicyLossOptions
from fusionrl.algorithms.sequences import Sequences


def guarded(loss: PolicyLoss) -> PolicyLoss:
    """`loss`, without the tokens that have mask 0 or an old log-prob that is -inf or NaN, as an engine may give.

    They have loss 0 and no gradient, and sequences are taken without them. Metrics are joined by `old_not_finite`, 1.0
    for a token left out so, and by `ppo_kl`, the estimate `old - new` of KL(old || new), 0.0 for such a token. A NaN of
    the trained policy itself is not due to an engine: it stays in, and the loss is NaN.
    """

    @functools.wraps(loss)
    def checked(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        sequences: Sequences,
        options: PolicyLossOptions,
        **extra: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [N] and metrics [N] of `loss`; every tensor is [N], one value a token."""
        finite = old_log_probs.isfinite() | ~log_probs.isfinite()
        used = finite & (mask > 0)
        # Values left out are replaced before use: NaN times a zero gradient would be NaN.
        log_probs = torch.where(used, log_probs, 0.0)
        old_log_probs = torch.where(used, old_log_probs, 0.0)
        advantages = torch.where(used, advantages, 0.0)
        losses, metrics = loss(log_probs, old_log_probs, advantages, mask * used, sequences, options, **extra)
        metrics = {name: torch.where(used, value, 0.0).detach() for name, value in metrics.items()}
        metrics["ppo_kl"] = (old_log_probs - log_probs).detach()
        metrics["old_not_finite"] = (~finite).to(log_probs.dtype)
        return torch.where(used, losses, 0.0), metrics

    return checked


def _loaded(function: str) -> PolicyLoss:
    module, name = function.split(".")
    loss: PolicyLoss = getattr(importlib.import_module(f"fusionrl.algorithms.{module}"), name)
    return loss


POLICY_LOSSES: dict[str, PolicyLoss] = {
    name: guarded(_loaded(loss.function)) for name, loss in LOSSES.items() if loss.function is not None
}
