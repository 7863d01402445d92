"""How far the engine's log-probs are from the trainer's for the same tokens under the same weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.algorithms.kl import k3
from fusionrl.algorithms.policy_loss import bounded_exp

# What `mismatch_sums` adds up, in this order.
MISMATCH_SUMS = ("compared", "not_finite", "signed", "abs", "k3", "over", "ratio", "ratio_squared")


@dataclass(frozen=True)
class MismatchLimits:
    """From where on `mismatch_warning` speaks. Starting points set by hand, not measured: adapt them to the model.

    token   nats by which a single token counts as off (`logprob_diff_over` is their share)
    mean    nats, of the mean |difference|
    k3      nats, of the estimated KL(engine || trainer)
    ess     lowest effective sample size, as a share of the tokens
    drift   how many times the mean |difference| of earlier steps it may become, once it is a tenth of `mean`
    """

    token: float = 0.5
    mean: float = 0.05
    k3: float = 0.01
    ess: float = 0.9
    drift: float = 5.0


@torch.no_grad()
def mismatch_sums(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, limits: MismatchLimits | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over tokens, to be added up over micro-batches and ranks, and the peak, of which the maximum counts.

    Tokens with mask 0 are left out; those where a log-prob is -inf or NaN are only counted.

    Args:
        train_log_probs, rollout_log_probs, mask: [N].
        limits: `token` decides which tokens count as off.

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
    }
    sums = torch.stack([parts[name].sum() for name in MISMATCH_SUMS])
    peak = difference.abs().max().reshape(1) if difference.numel() else difference.new_zeros(1)
    return sums, peak


def mismatch_metrics(sums: Tensor, peak: Tensor) -> dict[str, float]:
    """Metrics of `mismatch_sums` added up over everything; empty where there was no token at all.

    logprob_diff_mean, _max, _signed   of |trainer - engine|, and the mean of trainer - engine, in nats
    logprob_ratio_mean, _error   mean of the ratios w = trainer / engine, and its standard error
    logprob_k3           k3 estimate of KL(engine || trainer), in nats
    logprob_diff_over    share of tokens that are off by more than the limit
    logprob_ess          effective sample size `(sum w)^2 / (n sum w^2)`, 0 … 1
    logprob_not_finite   share of tokens with a log-prob that is no number, which the others leave out
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
            "logprob_ratio_error": math.sqrt(max(square - ratio**2, 0.0) / compared),
        }
    return metrics


def mismatch_warning(
    metrics: Mapping[str, float], limits: MismatchLimits | None = None, earlier_mean: float | None = None
) -> str | None:
    """What to tell the user about `metrics` of `mismatch_metrics`; None where all is well.

    Args:
        metrics: of this step.
        limits: when to speak.
        earlier_mean: `logprob_diff_mean` of earlier steps, to notice a drift below the limits.
    """
    limits = limits if limits is not None else MismatchLimits()
    mean = metrics.get("logprob_diff_mean", 0.0)
    found, look = [], []
    if metrics.get("logprob_not_finite", 0.0) > 0:
        found.append(f"{metrics['logprob_not_finite']:.2%} of the tokens have a log-prob of -inf or NaN")
        look.append("--rollout-top-p and --rollout-top-k (the engine may give log-probs of the cut distribution)")
    off = mean > limits.mean or metrics.get("logprob_k3", 0.0) > limits.k3
    off = off or metrics.get("logprob_ess", 1.0) < limits.ess
    if off:
        found.append(
            f"mean |difference| {mean:.2g} nats, largest {metrics['logprob_diff_max']:.2g}, k3 KL "
            f"{metrics['logprob_k3']:.2g}, effective sample size {metrics['logprob_ess']:.1%}"
        )
    elif earlier_mean is not None and mean > max(limits.drift * earlier_mean, limits.mean / 10):
        found.append(f"mean |difference| {mean:.2g} nats, up from {earlier_mean:.2g}")
        off = True
    if off:
        look += _suspects(metrics)
    if not found:
        return None
    return f"engine and trainer disagree: {'; '.join(found)}. Look at: {'; '.join(look)}."


def _suspects(metrics: Mapping[str, float]) -> list[str]:
    """What is worth a look, the likeliest first, by the shape of the difference."""
    mean, ratio = metrics["logprob_diff_mean"], metrics["logprob_ratio_mean"]
    # Over tokens drawn from the engine's distribution the mean of trainer / engine is 1, however far the two are apart.
    sampling = abs(ratio - 1.0) > max(0.02, 4.0 * metrics["logprob_ratio_error"])
    few = metrics["logprob_diff_over"] < 0.02 and metrics["logprob_diff_max"] > 20 * mean
    settings = (
        "--rollout-temperature, --rollout-top-p and --rollout-top-k (the mean ratio of the probabilities is "
        f"{ratio:.3g} and not 1: the tokens were drawn from another distribution than engine or trainer think)"
    )
    outliers = ["MoE routing that differs between engine and trainer", "the engine's attention backend"]
    everywhere = [
        "the dtype of weights, KV cache and output layer on both sides",
        "the weight version (samples of older weights, or weights that did not arrive)",
        "the temperature on both sides",
    ]
    if sampling:
        return [settings]
    return outliers + everywhere if few else everywhere + outliers
