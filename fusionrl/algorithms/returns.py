"""Discounted returns of tokens, REINFORCE++'s advantages: no critic and no groups, whitened over the whole batch."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.gae import check_fraction
from fusionrl.algorithms.responses import Responses
from fusionrl.algorithms.scan import discounted_sums


def discounted_returns(rewards: Tensor, responses: Responses, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}` over each sample's trained tokens; how untrained ones count: see `Responses`.

    REINFORCE++ takes them, of the score and the KL rewards (`token_rewards.py`), whitened, as advantages.
    Source: REINFORCE++ (arXiv 2501.03262).

    Args:
        rewards: [N]; 0 at untrained tokens.
        responses: the N tokens' samples and mask.
        gamma: discount, in 0 … 1.

    Returns:
        [N]; 0 at untrained tokens.

    Raises:
        ValueError: gamma out of range, a reward that is not finite or stands on an untrained token.
    """
    check_fraction("--gamma", gamma)
    returns = discounted_sums(responses.pick_rewards(rewards), responses.counts, gamma)
    return responses.place(returns, rewards.dtype)
