"""Distance of the engine's log-probs from the trainer's for the same tokens under the same weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusionrl.algorithms.kl import k3
from fusionrl.algorithms.mismatch_report import MismatchLimits
from fusionrl.algorithms.policy_loss import bounded_exp

# What `mismatch_sums` adds up, in this order.
MISMATCH_SUMS = ("compared", "not_finite", "signed", "abs", "k3", "over", "ratio", "ratio_squared", "not_sampled")


@torch.no_grad()
def mismatch_sums(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, limits: MismatchLimits | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over tokens, to be added up over micro-batches and ranks, and the peak, of which the maximum counts.

    Tokens with mask 0 are left out; those where a log-prob is -inf or NaN are only counted.

    Args:
        train_log_probs, rollout_log_probs, mask: [N].
        limits: `token` decides which tokens count as off, and as not sampled by the engine: those have the log-prob 0
            for tokens of tools, while the trainer's is far from 0.

    Returns:
        (sums [len(MISMATCH_SUMS)] fp64, largest |difference| [1] fp64, 0 without tokens)
    """
    limits = limits if limits is not None else MismatchLimits()
    trained = mask > 0
    finite = train_log_probs.isfinite() & rollout_log_probs.isfinite()
    used = trained & finite
    train, rollout = (torch.where(used, x.double(), 0.0) for x in (train_log_probs, rollout_log_probs))
    difference = train - rollout
    ratio = bounded_exp(difference) * used
    parts = {
        "compared": used.double(),
        "not_finite": (trained & ~finite).double(),
        "signed": difference,
        "abs": difference.abs(),
        "k3": k3(rollout, train),
        "over": (difference.abs() > limits.token).double(),
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "not_sampled": (used & (rollout == 0) & (train < -limits.token)).double(),
    }
    sums = torch.stack([parts[name].sum() for name in MISMATCH_SUMS])
    peak = difference.abs().max().reshape(1) if difference.numel() else difference.new_zeros(1)
    return sums, peak


@torch.no_grad()
def sample_differences(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, samples: Tensor, count: int
) -> Tensor:
    """[count, 2] fp64: sum of |trainer - engine| over each sample's tokens, and how many were compared.

    Tokens with mask 0 and those with a log-prob that is not finite are left out, as in `mismatch_sums`.

    Args:
        train_log_probs, rollout_log_probs, mask: [N].
        samples: [N], which of `count` samples each token belongs to.
    """
    difference = (train_log_probs.double() - rollout_log_probs.double()).abs()
    used = (mask > 0) & difference.isfinite()
    values = torch.stack([torch.where(used, difference, 0.0), used.double()], dim=1)
    return values.new_zeros(count, 2).index_add_(0, samples, values)


def mismatch_metrics(sums: Tensor, peak: Tensor) -> dict[str, float]:
    """Metrics of `mismatch_sums` added up over everything; empty without any token.

    logprob_diff_mean, _max, _signed   of |trainer - engine|, and the mean of trainer - engine, in nats
    logprob_ratio_mean, _error   mean of the ratios w = trainer / engine, and its standard error
    logprob_k3           k3 estimate of KL(engine || trainer), in nats
    logprob_diff_over    share of tokens that are off by more than the limit
    logprob_ess          effective sample size `(sum w)^2 / (n sum w^2)`, 0 … 1
    logprob_not_sampled  share of tokens that look as if no engine had sampled them: the engine's log-prob is exactly 0,
                         the trainer's is off by more than the limit
    logprob_not_finite   share of tokens with a log-prob that is not finite, which the others leave out
    """
    total = dict(zip(MISMATCH_SUMS, sums.tolist(), strict=True))
    compared, missing = total["compared"], total["not_finite"]
    if not compared + missing:
        return {}
    metrics = {"logprob_not_finite": missing / (compared + missing)}
    if compared:
        ratio, square = total["ratio"] / compared, total["ratio_squared"] / compared
        metrics |= {
            "logprob_diff_mean": total["abs"] / compared,
            "logprob_diff_max": float(peak),
            "logprob_diff_signed": total["signed"] / compared,
            "logprob_k3": total["k3"] / compared,
            "logprob_diff_over": total["over"] / compared,
            "logprob_ess": ratio**2 / square,
            "logprob_ratio_mean": ratio,
            "logprob_not_sampled": total["not_sampled"] / compared,
            "logprob_ratio_error": math.sqrt(max(square - ratio**2, 0.0) / compared),
        }
    return metrics
