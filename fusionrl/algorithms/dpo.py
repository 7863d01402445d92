"""Direct preference optimization: pairs of a chosen and a rejected answer. arXiv 2305.18290."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fusionrl.algorithms.sequences import Sequences


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

    Raises:
        ValueError: beta or label_smoothing outside its range.
    """
    if beta <= 0:
        raise ValueError(f"DPO's beta {beta} must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"DPO's label smoothing {label_smoothing} must be from 0 to below 0.5, where a pair says nothing"
        )
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


def dpo_token_losses(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    chosen: Tensor,
    rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`dpo_loss` of flat tokens: each token has the loss of its pair, so both answers must be in the micro-batch.

    With the weights `sequence_mean` of `token_weights` the loss is then the mean over pairs, whatever the split over
    micro-batches and ranks. The gradient comes to a token through the sum over its sequence: the one of its log-prob is
    the pair's `-+beta sigmoid(-beta h)`, over the number of pairs.

    A pair with an answer that has no token, and a pair with a log-prob of the reference that is not finite, has loss 0
    and no gradient; its tokens have 1.0 in the metric `pair_excluded`. A sequence of no pair has loss 0.

    Args:
        log_probs: [N] with gradient.
        ref_log_probs: [N].
        mask: [N]; a token counts or does not, by whether it is above 0.
        sequences: of the tokens.
        chosen, rejected: [P] int64, the sequences of each pair.

    Returns:
        (losses [N], metrics [N]: those of `dpo_loss` and `pair_excluded`)

    Raises:
        ValueError: a sequence that is in two pairs, or twice in one; and those of `dpo_loss`.
    """
    members = torch.cat([chosen, rejected])
    if members.unique().numel() != members.numel():
        raise ValueError("each sequence may be in one pair only: chosen and rejected name one of them twice")
    counted = mask > 0
    known = counted & ref_log_probs.isfinite()
    # Differences of tokens first: the sums of long answers are large, and their difference small.
    ratios = sequences.sum(torch.where(known, log_probs, 0.0) - torch.where(known, ref_log_probs, 0.0))
    tokens, missing = sequences.sum(counted.double()), sequences.sum((counted & ~known).double())
    sound = (tokens > 0) & (missing == 0)
    good = sound[chosen] & sound[rejected]
    zero = torch.zeros_like(ratios[chosen])
    loss, metrics = dpo_loss(ratios[chosen], ratios[rejected], zero, zero, beta, label_smoothing)

    def to_tokens(pairs: Tensor) -> Tensor:
        both = ratios.new_zeros(sequences.count).index_put((members,), torch.cat([pairs, pairs]))
        return torch.where(counted, sequences.spread(both), 0.0)

    values = {name: to_tokens(torch.where(good, value, 0.0)) for name, value in metrics.items()}
    values["pair_excluded"] = to_tokens((~good).to(ratios.dtype))
    return to_tokens(torch.where(good, loss, 0.0)), values
