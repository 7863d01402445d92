"""Estimators of KL(policy || reference) from one sample's log-probs.

Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With
`x = log p_policy(token)` and `y = log p_reference(token)` of a token drawn from the policy:
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}
