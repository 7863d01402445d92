"""Estimators of KL(policy || reference) from one sample's log-probs.

Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With
`x = log p_policy(token)` and `y = log p_reference(token)` of a token drawn from the policy:
"""

from collections.abc import Callable

from torch import Tensor

from fusionrl.algorithms.log_ratio import bounded_exp

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

    A token whose old log-prob is not finite has 0 and no gradient.

    Args:
        log_probs: of the policy that is trained, with gradient.
        old_log_probs: of the policy that drew the tokens.
        ref_log_probs: of the reference.
        estimator: a name in `KL_ESTIMATORS`.
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
