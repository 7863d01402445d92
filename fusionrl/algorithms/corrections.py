"""Corrections for tokens that another policy drew: an engine with other numerics, or older weights.

`importance_weights` compares the trainer's log-probs with those of the policy that acted; a token's policy loss is to
be multiplied by its weight. Methods as options (`CorrectionOptions`):

    TIS, truncated      level="token", mode="truncate", high=2: --use-tis, of the blog post "Your Efficient RL Framework
                        Secretly Brings You Off-Policy RL Training" (Yao et al., 2025); --tis-clip-low is `low`
    IcePop              level="token", mode="mask", low=0.5, high=5: "Every Step Evolves", arXiv 2510.18855
    MIS, masked         level="sequence", mode="mask": "When Speed Kills Stability" (Liu et al., 2025); also "geometric"
    rejection           reject_level, next to any of these or, with mode="none", alone
    veto                veto=1e-4: a sequence with a token that the trainer finds so much less likely is dropped
    decoupled PPO       train_log_probs of the proximal policy, recomputed before the update, which are also the
                        policy loss's old_log_probs: the ratio new/proximal is clipped, proximal/behaviour truncated
                        (arXiv 2110.00641; AReaL, arXiv 2505.24298)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fusionrl.algorithms.divergence import bounded_exp
from fusionrl.algorithms.sequences import Sequences

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionOptions:
    """Settings of `importance_weights`: its weights and what it drops.

    level   of the weight: each token's ratio, the product over its sequence, or the geometric mean over it
    mode    "truncate": the ratio moved into low … high; "mask": ratios outside of low … high have weight 0;
            "none": all weights are 1
    reject_level, reject_low, reject_high
            drop whole sequences whose product or geometric mean is outside of the range or, at "token", that have a
            token whose ratio is; None: none
    veto    drop whole sequences with a token whose ratio is below it; None: none
    """

    level: Level = "token"
    mode: Literal["truncate", "mask", "none"] = "truncate"
    low: float = 0.0
    high: float = 2.0
    reject_level: Level | None = None
    reject_low: float = 0.5
    reject_high: float = 2.0
    veto: float | None = None


METRICS = """
train/opsm_fraction | share | Share of tokens masked because their advantage is negative and their sample too far from
    the policy. | --use-opsm
train/is_ratio | ratio | Mean over tokens of the importance ratio trainer / engine (of a token or its sample,
    --tis-level), before clipping. | --use-tis, --rejection-level or --tis-veto
train/is_abs | ratio | Mean over tokens of |importance ratio - 1|. | --use-tis, --rejection-level or --tis-veto
train/is_clip_fraction | share | Share of tokens whose importance ratio is outside --tis-clip-low … --tis-clip. |
    --use-tis, --rejection-level or --tis-veto
train/is_rejected | share | Share of tokens in samples that --rejection-level drops. | --use-tis, --rejection-level or
    --tis-veto
train/is_vetoed | share | Share of tokens in samples that --tis-veto drops. | --use-tis, --rejection-level or
    --tis-veto
train/is_dropped | share | Share of tokens that the correction drops for any reason. | --use-tis, --rejection-level or
    --tis-veto
train/is_not_finite | share | Share of tokens without an importance ratio. | --use-tis, --rejection-level or
    --tis-veto
"""


@torch.no_grad()
def importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequences: Sequences, options: CorrectionOptions
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights `pi_train / pi_rollout` of tokens [N], without gradient, and which tokens stay; tokens of mask 0 do not.

    A token where one of the log-probs is -inf or NaN has no ratio: it is dropped, the sums over its sequence are taken
    without it, and `is_not_finite` counts it. Only the veto sees a trainer's -inf, as a ratio of 0.

    Returns weights [N], 0 where a token is not kept; keep [N] bool; metrics [N], whose masked means are meant:
    `is_ratio` and its distance from 1 `is_abs` before clipping (1 and 0 without a ratio), `is_clip_fraction` of ratios
    outside of low … high, `is_rejected` and `is_vetoed` by whole sequences, `is_dropped` for any reason.
    """
    difference = train_log_probs - rollout_log_probs
    finite = train_log_probs.isfinite() & rollout_log_probs.isfinite()
    used = (mask > 0) & finite
    difference_used = torch.where(used, difference, 0.0)

    def ratio_of(level: Level) -> Tensor:
        if level == "token":
            return bounded_exp(difference_used)
        log_ratio = sequences.sum(difference_used) if level == "sequence" else sequences.mean(difference_used, used)
        return sequences.spread(bounded_exp(log_ratio))

    def in_sequence(tokens: Tensor) -> Tensor:
        return sequences.spread(sequences.sum(tokens.to(difference.dtype))) > 0

    ratio = ratio_of(options.level)
    outside = (ratio < options.low) | (ratio > options.high)
    rejected = vetoed = torch.zeros_like(used)
    if options.reject_level is not None:
        rejecting = ratio_of(options.reject_level)
        out = (rejecting < options.reject_low) | (rejecting > options.reject_high)
        rejected = in_sequence(out & used) if options.reject_level == "token" else out
    if options.veto is not None:
        catastrophic = rollout_log_probs.isfinite() & (difference < math.log(options.veto))
        vetoed = in_sequence((mask > 0) & catastrophic)
    keep = used & ~rejected & ~vetoed
    weights = torch.ones_like(ratio) if options.mode == "none" else ratio
    if options.mode == "truncate":
        weights = ratio.clamp(options.low, options.high)
    elif options.mode == "mask":
        keep &= ~outside
    flags = {
        "is_clip_fraction": outside if options.mode != "none" else torch.zeros_like(outside),
        "is_rejected": rejected,
        "is_vetoed": vetoed,
        "is_dropped": ~keep,
        "is_not_finite": ~finite,
    }
    metrics = {"is_ratio": ratio, "is_abs": (ratio - 1.0).abs()}
    metrics |= {name: flag.to(ratio.dtype) for name, flag in flags.items()}
    return torch.where(keep, weights, 0.0), keep, metrics


@torch.no_grad()
def opsm_mask(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, delta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Off-policy sequence masking: tokens with a negative advantage stay only while their sequence is near the policy.

    Near means: the mean over the sequence's tokens of `old - new` is at most `delta`. Source: DeepSeek-V3.2
    (arXiv 2512.02556), section 3.1; --use-opsm --opsm-delta. A token whose old log-prob is not finite is left out of
    the mean; whether it stays is decided like for the others. `log_probs` belong to the current policy, `delta` is in
    nats; all tensors are [N].

    Returns (keep [N] bool, metrics [N]: `opsm_fraction`, 1.0 where a token was masked).
    """
    divergence = sequences.mean(old_log_probs - log_probs, mask * old_log_probs.isfinite())
    masked = (mask > 0) & (advantages < 0) & (sequences.spread(divergence) > delta)
    return ~masked, {"opsm_fraction": masked.to(log_probs.dtype)}
