"""Distance of the engine's log-probs from the trainer's for the same tokens under the same weights."""

import math

import torch
from torch import Tensor

from fusionrl.algorithms.kl import k3
from fusionrl.algorithms.log_ratio import bounded_exp
from fusionrl.algorithms.mismatch_report import MismatchLimits

# What `mismatch_sums` adds up, in this order.
MISMATCH_SUMS = ("compared", "not_finite", "signed", "abs", "k3", "over", "ratio", "ratio_squared", "not_sampled")


@torch.no_grad()
def mismatch_sums(train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over tokens, to be added up over micro-batches and ranks, and the peak, of which the maximum counts.

    Tokens [N] with mask 0 are left out; those where a log-prob is -inf or NaN are only counted. A token that the engine
    did not sample (a tool's) has log-prob 0 there, while the trainer's is far from 0.

    Returns:
        (sums [len(MISMATCH_SUMS)] fp64, largest |difference| [1] fp64, 0 without tokens)
    """
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
        "over": (difference.abs() > MismatchLimits.token).double(),
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "not_sampled": (used & (rollout == 0) & (train < -MismatchLimits.token)).double(),
    }
    sums = torch.stack([parts[name].sum() for name in MISMATCH_SUMS])
    peak = difference.abs().max().reshape(1) if difference.numel() else difference.new_zeros(1)
    return sums, peak


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
