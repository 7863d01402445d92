"""Direct preference optimization: pairs of a chosen and a rejected answer. arXiv 2305.18290."""

import math
from collections.abc import Iterable

import torch
from torch.nn.functional import logsigmoid

METRICS = """
train/dpo_loss | nats | DPO's loss before each optimizer step, mean over pairs. | --policy-loss dpo
train/reward_margin | nats | Mean over pairs of the implicit reward of the chosen answer minus that of the rejected;
    an implicit reward is --dpo-beta x (log p(policy) - log p(reference)). | --policy-loss dpo
train/reward_accuracy | share | Share of pairs with a margin above 0. | --policy-loss dpo
train/chosen_reward | nats | Mean implicit reward of the chosen answers. | --policy-loss dpo
train/rejected_reward | nats | Mean implicit reward of the rejected answers. | --policy-loss dpo
train/num_pairs | pairs | Pairs that were trained on. | --policy-loss dpo
train/pairs_excluded | pairs | Pairs left out: an answer has no trained token, or a log-prob that is -inf or NaN. |
    --policy-loss dpo
"""


def pair_slopes(
    answers: Iterable[tuple[int, float, float]], beta: float, label_smoothing: float
) -> tuple[dict[int, float], dict[str, float]]:
    """Return (pair -> derivative of DPO's loss by its chosen answer's log-prob, the rejected one's negated; metrics).

    So a token's log-prob needs only a number to have DPO's gradient, and the two answers need not be in one place.
    The loss is `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, h the log ratio of the chosen less that of the
    rejected: equation 7, with the label smoothing e of "A note on DPO with noisy preferences" (Mitchell, 2023): the
    chance that a pair is the wrong way round. A pair with an answer that is missing, or whose log ratio is not finite,
    has no slope; `pairs_excluded` counts them. ValueError: a pair with two chosen or two rejected answers.

    answers  (pair, +1 chosen or -1 rejected, log ratio of policy to reference summed over the trained tokens) of each
             answer that has a trained token
    """
    pairs: dict[int, dict[float, float]] = {}
    for pair, sign, total in answers:
        if sign in pairs.setdefault(pair, {}):
            raise ValueError(f"pair {pair} has two answers of sign {sign:+g}; a pair is one chosen and one rejected")
        pairs[pair][sign] = total
    order = sorted(pair for pair, of in pairs.items() if len(of) == 2 and all(map(math.isfinite, of.values())))
    means = {"num_pairs": float(len(order)), "pairs_excluded": float(len(pairs) - len(order))}
    if not order:
        return {}, means
    chosen, rejected = (
        beta * torch.tensor([pairs[pair][sign] for pair in order], dtype=torch.float64) for sign in (1.0, -1.0)
    )
    margin = chosen - rejected
    slopes = beta * (label_smoothing * margin.sigmoid() - (1.0 - label_smoothing) * (-margin).sigmoid())
    values = {
        "dpo_loss": -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).double(),
    }
    return dict(zip(order, slopes.tolist(), strict=True)), means | {n: float(v.mean()) for n, v in values.items()}
