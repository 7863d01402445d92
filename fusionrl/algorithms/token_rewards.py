"""Rewards of tokens: the sample's score at its end, and the KL divergence to the reference as a price."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.kl import KL_ESTIMATORS
from fusionrl.algorithms.log_ratio import comparable
from fusionrl.algorithms.responses import Responses


def score_rewards(scores: Tensor, responses: Responses) -> Tensor:
    """Each sample's score [n] on its last trained token -> [N]; that of a sample without one is left out.

    Raises:
        ValueError: a score that is not finite.
    """
    if not scores.isfinite().all():
        bad = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(f"reward {float(scores[bad])} of sample {bad} is not finite")
    rewards = scores.new_zeros(responses.mask.numel())
    rewards[responses.positions[responses.last]] = scores[responses.counts > 0]
    return rewards


def kl_rewards(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str, coef: float) -> tuple[Tensor, Tensor]:
    """`-coef * KL` of each trained token, by an estimator of `kl.py`; 0 at untrained tokens.

    Source: InstructGPT (arXiv 2203.02155), equation 2, its beta term.

    Args:
        log_probs: [N] of the policy that wrote the tokens, without gradient.
        ref_log_probs: [N] of the reference.
        mask: [N].
        kind: a name in KL_ESTIMATORS.
        coef: the price of a nat.

    Returns:
        (rewards [N], excluded []): a token with a log-prob that is not finite gets 0 and is counted.

    Raises:
        ValueError: the estimate of finite log-probs overflows.
    """
    policy, reference, excluded = comparable(log_probs, ref_log_probs, mask)
    kl = KL_ESTIMATORS[kind](policy, reference)
    if not kl.isfinite().all():
        apart = float((policy - reference).abs().max())
        raise ValueError(
            f"--kl-coef-type {kind}: log-probs of policy and reference are up to {apart:.0f} nats apart, too far for "
            "this estimator; low_var_kl is bounded"
        )
    return -coef * kl, excluded
