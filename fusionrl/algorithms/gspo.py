"""GSPO: the ratio of whole sequences, clipped as one. Group Sequence Policy Optimization, arXiv 2507.18071."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.policy_loss import PolicyLossOptions, bounded_exp, clipped_surrogate
from fusionrl.algorithms.sequences import Sequences


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss with the sequence's ratio `s = exp(mean over its tokens of (new - old))` at each of its tokens.

    Section 4.1. The gradient of each token's loss runs into all tokens of its sequence. The paper's objective is the
    mean over sequences, that is the weights `sequence_mean` of `token_weights`.
    """
    log_ratio = sequences.mean(log_probs - old_log_probs, mask)
    return clipped_surrogate(sequences.spread(bounded_exp(log_ratio)), advantages, options)


def gspo_token(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The token form: the value of the sequence's ratio, `sg[s] * p / sg[p]`, with the gradient of the token alone.

    Section 4.3; sg stops the gradient. Meant for advantages that differ within a sequence; with equal ones, and equal
    weights, its gradient is that of `gspo`.
    """
    log_ratio = sequences.mean(log_probs.detach() - old_log_probs, mask)
    ratio = sequences.spread(bounded_exp(log_ratio)) * (log_probs - log_probs.detach()).exp()
    return clipped_surrogate(ratio, advantages, options)
