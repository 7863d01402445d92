"""Direct preference optimization: pairs of a chosen and a rejected answer. arXiv 2305.18290."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, h the log ratio of the chosen less that of the rejected.

    Equation 7, with the label smoothing e of "A note on DPO with noisy preferences" (Mitchell, 2023): the chance that
    a pair is the wrong way round.

    Args:
        policy_chosen, policy_rejected: [P] log-probs of whole answers under the policy, with gradient.
        reference_chosen, reference_rejected: [P] the same under the reference.
        beta: how much a nat of divergence from the reference costs.
        label_smoothing: e, from 0 to below 0.5.

    Returns:
        (loss [P], metrics [P]): the implicit rewards `beta * (policy - reference)`, their `reward_margin`, and
        `reward_accuracy`, 1.0 where the chosen has the higher one.
    """
    chosen, rejected = beta * (policy_chosen - reference_chosen), beta * (policy_rejected - reference_rejected)
    margin = chosen - rejected
    loss = -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    metrics = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).to(margin.dtype),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def pair_slopes(
    answers: Iterable[tuple[int, float, float]], beta: float, label_smoothing: float
) -> tuple[dict[int, float], dict[str, float]]:
    """Each pair's derivative of `dpo_loss` by the log-prob of its chosen answer; by the rejected one's, the opposite.

    So a token's log-prob needs only a number to have DPO's gradient, and the two answers need not be in one place.

    Args:
        answers: (pair, +1 chosen or -1 rejected, log ratio of policy to reference summed over the trained tokens) of
            each answer that has a trained token.
        beta, label_smoothing: as of `dpo_loss`.

    Returns:
        (pair -> slope, metrics: means over these pairs of the loss, as `dpo_loss`, and of its metrics; `num_pairs`,
        their number). A pair with an answer that is missing, or whose log ratio is not finite, has no slope;
        `pairs_excluded` counts them.

    Raises:
        ValueError: a pair with two chosen or two rejected answers.
    """
    pairs: dict[int, dict[float, float]] = {}
    for pair, sign, total in answers:
        if sign in pairs.setdefault(pair, {}):
            raise ValueError(f"pair {pair} has two answers of sign {sign:+g}; a pair is one chosen and one rejected")
        pairs[pair][sign] = total
    order = sorted(
        pair for pair, of in pairs.items() if set(of) == {1.0, -1.0} and all(map(math.isfinite, of.values()))
    )
    chosen = torch.tensor([pairs[pair][1.0] for pair in order], dtype=torch.float64).requires_grad_()
    rejected = torch.tensor([pairs[pair][-1.0] for pair in order], dtype=torch.float64)
    zeros = torch.zeros_like(rejected)
    losses, metrics = dpo_loss(chosen, rejected, zeros, zeros, beta, label_smoothing)
    means = {"num_pairs": float(len(order)), "pairs_excluded": float(len(pairs) - len(order))}
    if not order:
        return {}, means
    (slopes,) = torch.autograd.grad(losses.sum(), chosen)
    values = {"dpo_loss": losses.detach()} | metrics
    means |= {name: float(value.mean()) for name, value in values.items()}
    return dict(zip(order, slopes.tolist(), strict=True)), means
