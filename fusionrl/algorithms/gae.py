"""Generalised advantage estimation, PPO's."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionrl.algorithms.responses import Responses
from fusionrl.algorithms.scan import discounted_sums


def gae(
    rewards: Tensor,
    values: Tensor,
    responses: Responses,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`A_t = d_t + gamma lam A_{t+1}`, `d_t = r_t + gamma V_{t+1} - V_t`, over each sample's trained tokens.

    Source: GAE (arXiv 1506.02438), equation 16. How untrained tokens count: see `Responses`.

    Args:
        rewards: [N]; 0 at untrained tokens.
        values: [N], the critic's value before each token; anything at untrained tokens.
        responses: the N tokens' samples and mask.
        gamma: discount, in 0 … 1.
        lam: in 0 … 1; 1 is the return minus the value.
        last_values: [n], the value after a response's last token; None is 0 for all, as if each response had ended by
            itself, a truncated one too; see `truncated_values`.

    Returns:
        (advantages [N], returns [N]), `returns = advantages + values`, the critic's target; 0 at untrained tokens.

    Raises:
        ValueError: gamma or lam out of range, a reward or value that is not finite, or a reward on an untrained token.
    """
    check_fraction("--gamma", gamma)
    check_fraction("--lambd", lam)
    picked = responses.pick(values, "value")
    following = picked.roll(-1)
    after = torch.zeros_like(responses.counts, dtype=torch.float64) if last_values is None else last_values.double()
    if not after.isfinite().all():
        raise ValueError(f"a value after the last token is not finite: {after[~after.isfinite()][0]}")
    following[responses.last] = after[responses.counts > 0]
    deltas = responses.pick_rewards(rewards) + gamma * following - picked
    advantages = discounted_sums(deltas, responses.counts, gamma * lam)
    return responses.place(advantages, values.dtype), responses.place(advantages + picked, values.dtype)


def truncated_values(values: Tensor, responses: Responses, truncated: Tensor) -> Tensor:
    """`last_values` of `gae`: for each truncated sample the value of its last trained token, 0 for the others.

    A response cut at its length limit did not end, and 0 after it would teach the critic that it had (partial-episode
    bootstrapping, arXiv 1712.00378, section 3). The value before the last token, which the critic has given already,
    represents the one after it.

    Args:
        values: [N]; truncated: [n] bool -> [n].
    """
    after = values.new_zeros(truncated.shape)
    after[responses.counts > 0] = values[responses.positions[responses.last]]
    return torch.where(truncated, after, 0.0)


def check_fraction(flag: str, value: float) -> None:
    """Refuse a discount outside of 0 … 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{flag} {value}: must be from 0 to 1")
