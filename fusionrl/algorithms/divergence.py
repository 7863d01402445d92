"""How far two models' log-probs of the same tokens are apart: ratios, estimates of KL, and the engine's mismatch.

KL(policy || reference) is estimated from one sample's log-probs: `x = log p_policy(token)` and
`y = log p_reference(token)` of a token drawn from the policy. Source: J. Schulman, "Approximating KL divergence"
(2020), http://joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusionrl.algorithms.mismatch_report import MismatchLimits

# A ratio beyond exp(+-20) is as good as infinite or zero. Without a bound its product with a zero gradient is NaN.
LOG_RATIO_BOUND = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` within exp(+-20); without gradient beyond. [N] -> [N]"""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def comparable(log_probs: Tensor, reference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both log-probs [N] of the trained tokens, and 0 for both where either is not finite, or the token is untrained.

    A difference, or an estimate of KL, is then 0 there, and so is its gradient: such a token is left out. An engine
    gives -inf for a token that its own top-p or vocabulary forbids, and NaN where a kernel failed. The third value
    counts the trained tokens left out, int64.
    """
    trained = mask != 0
    usable = trained & log_probs.isfinite() & reference.isfinite()
    return torch.where(usable, log_probs, 0.0), torch.where(usable, reference, 0.0), (trained & ~usable).sum()


def reverse_kl_gap(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """On-policy distillation: `log p_teacher - log p_student` [N] at trained tokens, as an advantage of each.

    As a policy gradient that lowers the reverse KL, KL(student || teacher), token by token, without the later tokens'.
    Source: GKD (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543) for the reverse KL on the student's own text.
    A token with a log-prob that is not finite gets 0 and is counted -> (advantages [N], excluded []).
    """
    student, teacher, excluded = comparable(student_log_probs, teacher_log_probs, mask)
    return teacher - student, excluded


LOW_VAR_BOUND = 10.0


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`x - y`: unbiased, of high variance, negative for some tokens. [t], [t] -> [t]"""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`(x - y)^2 / 2`: biased, of low variance; its gradient is unbiased. [t], [t] -> [t]"""
    return 0.5 * (log_probs - ref_log_probs) ** 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`exp(y - x) - 1 - (y - x)`: unbiased and never negative; GRPO's choice. [t], [t] -> [t]"""
    difference = ref_log_probs - log_probs
    return difference.exp() - 1.0 - difference


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`k3` clamped to +-10, so that one token the reference finds impossible cannot rule a batch."""
    return k3(log_probs, ref_log_probs).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)


def unbiased_kl(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """`exp(x - x_old)` times an estimator, for tokens drawn from an old policy. [t], [t], [t] -> [t]

    With k1 or k3 the mean over tokens of the old policy is KL(policy || reference), and the mean of the gradient is its
    gradient, which runs through the ratio too; without the ratio k3's gradient is that of KL(reference || policy), and
    k1's is 0 on average. `low_var_kl` is bounded as a product, so it is unbiased only within the bound; `k2` stays
    biased. Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.

    A token whose old log-prob is not finite has 0 and no gradient. `estimator` is a name in `KL_ESTIMATORS`.
    """
    known = old_log_probs.isfinite() | ~log_probs.isfinite()  # a NaN of the policy itself stays one
    policy = log_probs.where(known, 0.0)
    ratio = bounded_exp(policy - old_log_probs.where(known, 0.0))
    product = ratio * KL_ESTIMATORS["k3" if estimator == "low_var_kl" else estimator](policy, ref_log_probs)
    if estimator == "low_var_kl":
        product = product.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return product.where(known, 0.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}


# What `mismatch_sums` adds up, in this order.
MISMATCH_SUMS = ("compared", "not_finite", "signed", "abs", "k3", "over", "ratio", "ratio_squared", "not_sampled")


METRICS = """
train/logprob_diff_mean | nats | Mean of |log p(trainer) - log p(engine)| over the trained tokens that the current
    weights sampled. As the other metrics of this table, it leaves out tokens of older weights (--partial-rollout). |
    mode rl, where the engines' log-probs are known
train/logprob_diff_max | nats | The largest of these differences. | mode rl, where the engines' log-probs are known
train/logprob_diff_signed | nats | Mean of log p(trainer) - log p(engine). | mode rl, where the engines' log-probs are
    known
train/logprob_diff_over | share | Share of tokens that differ by more than 0.5 nats. | mode rl, where the engines'
    log-probs are known
train/logprob_k3 | nats | Estimate (k3) of KL(engine || trainer), mean over tokens. | mode rl, where the engines'
    log-probs are known
train/logprob_ess | 0 … 1 | Effective sample size (sum w)^2 / (n sum w^2) of the ratios w = p(trainer) / p(engine). |
    mode rl, where the engines' log-probs are known
train/logprob_ratio_mean | ratio | Mean of the ratios w: 1 where the tokens were drawn from the distribution that the
    engine's log-probs are of. | mode rl, where the engines' log-probs are known
train/logprob_not_sampled | share | Share of the trained tokens with an engine log-prob of exactly 0 that the trainer
    finds unlikely: no engine sampled them. | mode rl, where the engines' log-probs are known
train/logprob_ratio_error | ratio | Standard error of that mean, over the tokens of all steps together. | mode rl,
    where the engines' log-probs are known
train/logprob_not_finite | share | Share of tokens with a log-prob of -inf or NaN; the other metrics leave them out. |
    mode rl, where the engines' log-probs are known
"""


@torch.no_grad()
def mismatch_sums(train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over tokens, to be added up over micro-batches and ranks, and the peak, of which the maximum counts.

    Tokens [N] with mask 0 are left out; those where a log-prob is -inf or NaN are only counted. A token that the engine
    did not sample (a tool's) has log-prob 0 there, while the trainer's is far from 0.
    Returns (sums [len(MISMATCH_SUMS)] fp64, largest |difference| [1] fp64, 0 without tokens).
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
