"""The clipped policy loss of PPO, and what all policy losses share.

A policy loss is a function of flat tokens, see `PolicyLoss`; `policy_losses.py` has the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.algorithms.sequences import Sequences

# A ratio beyond exp(+-20) is as good as infinite or zero. Without a bound its product with a zero gradient is NaN.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyLossOptions:
    """Constants of the policy losses; each loss reads its own. Defaults are the papers', named in each loss's file.

    eps_low, eps_high   clip range 1 - eps_low … 1 + eps_high of the ratio; docs/guides/algorithms.md has each method's
    dual_clip           a negative advantage's loss is at most `dual_clip` times its size; None: no bound
    sapo_tau_pos, sapo_tau_neg    SAPO's temperatures for advantages above 0 and others
    clip_cov_fraction, clip_cov_low, clip_cov_high    Clip-Cov: which share of the tokens, of which covariances
    kl_cov_fraction, kl_cov_coef  KL-Cov: which share of the tokens, and the weight of their penalty

    Raises:
        ValueError: a value outside its range.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    clip_cov_fraction: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_fraction: float = 2e-4
    kl_cov_coef: float = 1.0

    def __post_init__(self) -> None:
        if self.eps_low < 0 or self.eps_high < 0:
            raise ValueError(f"the clip range {self.eps_low}, {self.eps_high} must not be negative: it is around 1")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"the dual clip {self.dual_clip} must be above 1, or it would also bound the ratio 1")
        if self.sapo_tau_pos <= 0 or self.sapo_tau_neg <= 0:
            raise ValueError(f"SAPO's temperatures {self.sapo_tau_pos}, {self.sapo_tau_neg} must be above 0")
        if not (0 < self.clip_cov_fraction <= 1 and 0 < self.kl_cov_fraction <= 1):
            raise ValueError(
                f"the shares of tokens {self.clip_cov_fraction} and {self.kl_cov_fraction} that Clip-Cov and KL-Cov "
                "choose must be above 0 and at most 1"
            )


# (log_probs [N], old_log_probs [N], advantages [N], mask [N], sequences, options)
# -> (loss of each token [N], metrics: per-token values [N], of which the masked mean over all tokens counts)
PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` within exp(+-20); without gradient beyond. [N] -> [N]"""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of a ratio: `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`, with the dual clip at most `-A c`.

    Source: PPO (arXiv 1707.06347), equation 7; the asymmetric range is DAPO's (arXiv 2503.14476), section 3.1; the dual
        clip, for A < 0 only, is from arXiv 1912.09729.

    Args:
        ratio: [N] new over old probability, with gradient.
        advantages: [N].
        options: the ranges.

    Returns:
        (loss [N], metrics [N]): `clip_fraction` and, with a dual clip, `dual_clip_fraction` are 1.0 where the clip took
        the gradient away, else 0.0.
    """
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - options.eps_low, 1.0 + options.eps_high)
    loss = torch.maximum(free, bounded)
    metrics = {"clip_fraction": (bounded > free).to(ratio.dtype)}
    if options.dual_clip is not None:
        ceiling = -advantages * options.dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        metrics["dual_clip_fraction"] = over.to(ratio.dtype)
    return loss, metrics


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clipped_surrogate` of each token's own ratio `exp(new - old)`."""
    return clipped_surrogate(bounded_exp(log_probs - old_log_probs), advantages, options)
