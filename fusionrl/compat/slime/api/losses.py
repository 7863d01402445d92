"""Names of `slime.utils.ppo_utils` that custom losses use. Shapes are [t], values of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionrl.algorithms.kl import KL_ESTIMATORS, LOW_VAR_BOUND


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Return an estimate of KL(policy || base) for each token; see `fusionrl.algorithms.kl`.

    importance_ratio  probability of the policy over that of the one that drew the token, for an unbiased estimate

    Raises:
        ValueError: an unknown estimator.
    """
    if kl_loss_type not in KL_ESTIMATORS:
        raise ValueError(f"kl_loss_type={kl_loss_type!r}: choose one of {', '.join(KL_ESTIMATORS)}")
    if importance_ratio is None:
        return KL_ESTIMATORS[kl_loss_type](log_probs.float(), log_probs_base.float())
    is_bounded = kl_loss_type == "low_var_kl"
    estimator = KL_ESTIMATORS["k3" if is_bounded else kl_loss_type]
    product = importance_ratio * estimator(log_probs.float(), log_probs_base.float())
    return product.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if is_bounded else product


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token, and 1 where the clip decided it (arXiv 1707.06347, equation 7).

    ppo_kl      old log-prob minus new log-prob
    eps_clip_c  dual clip: a negative advantage's loss is at most so many times its size (arXiv 1912.09729)

    Raises:
        ValueError: a dual clip that is not above 1.
    """
    ratio = (-ppo_kl).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        if eps_clip_c <= 1.0:
            raise ValueError(f"eps_clip_c={eps_clip_c} must be above 1, or it would also bound the ratio 1")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > plain).float()
