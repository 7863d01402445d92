"""Advantages and returns token by token: rewards of tokens, discounted returns (REINFORCE++), and GAE (PPO).

All run over each sample's trained tokens; how untrained ones count: see `Responses`.
"""

import torch
from torch import Tensor

from fusionrl.algorithms.kl import KL_ESTIMATORS
from fusionrl.algorithms.log_ratio import comparable
from fusionrl.algorithms.responses import Responses

CHUNK = 128


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
    """`-coef * KL` of each trained token [N], by the estimator `kind` of `kl.py`; 0 at untrained tokens.

    Source: InstructGPT (arXiv 2203.02155), equation 2, its beta term.

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


def discounted_returns(rewards: Tensor, responses: Responses, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}` [N], 0 at untrained tokens. Source: REINFORCE++ (arXiv 2501.03262).

    Raises:
        ValueError: a reward [N] that is not finite, or that stands on an untrained token.
    """
    returns = discounted_sums(responses.pick_rewards(rewards), responses.counts, gamma)
    return responses.place(returns, rewards.dtype)


def gae(
    rewards: Tensor,
    values: Tensor,
    responses: Responses,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`A_t = d_t + gamma lam A_{t+1}`, `d_t = r_t + gamma V_{t+1} - V_t`.

    Source: GAE (arXiv 1506.02438), equation 16.

    Args:
        rewards: [N]; 0 at untrained tokens.
        values: [N], the critic's value before each token; anything at untrained tokens.
        responses: the N tokens' samples and mask.
        gamma: discount.
        lam: 1 is the return minus the value.
        last_values: [n], the value after a response's last token; None is 0 for all, as if each response had ended by
            itself, a truncated one too; see `truncated_values`.

    Returns:
        (advantages [N], returns [N]), `returns = advantages + values`, the critic's target; 0 at untrained tokens.

    Raises:
        ValueError: a reward or value that is not finite, or a reward on an untrained token.
    """
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
    """`last_values` of `gae` [n]: for each `truncated` sample [n] the value [N] of its last trained token, else 0.

    A response cut at its length limit did not end, and 0 after it would teach the critic that it had (partial-episode
    bootstrapping, arXiv 1712.00378, section 3). The value before the last token, which the critic has given already,
    represents the one after it.
    """
    after = values.new_zeros(truncated.shape)
    after[responses.counts > 0] = values[responses.positions[responses.last]]
    return torch.where(truncated, after, 0.0)


def discounted_sums(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """`y_t = x_t + decay * y_{t+1}` within each sequence, with 0 after its end, without a step per token.

    Sequences are cut into chunks of 128. Within a chunk the sums are one product with the matrix of powers
    `decay^(j - i)`, j >= i; what flows in from the next chunk obeys the same recursion over the chunks' first values,
    with `decay^128`, and so on: 32k tokens take three rounds.

    Args:
        values: [N], flat, one sequence after the other.
        lengths: [n] int64, their sum is N.
        decay: in 0 … 1.

    Returns:
        [N], of the type of `values`.
    """
    if not values.numel():
        return values.clone()
    device = values.device
    chunks = (lengths + CHUNK - 1).div(CHUNK, rounding_mode="floor")  # [n]
    ends = chunks.cumsum(0)
    first_slots = (ends - chunks) * CHUNK - (lengths.cumsum(0) - lengths)
    slots = torch.arange(values.numel(), device=device) + first_slots.repeat_interleave(lengths)
    grid = values.new_zeros(int(ends[-1]) * CHUNK)
    grid[slots] = values
    powers = decay ** torch.arange(CHUNK + 1, dtype=values.dtype, device=device)
    steps = torch.arange(CHUNK, device=device)
    distance = steps[:, None] - steps  # [CHUNK, CHUNK], from column i on to row j
    matrix = torch.where(distance >= 0, powers[distance.clamp(min=0)], 0.0)
    sums = grid.view(-1, CHUNK) @ matrix  # [all chunks, CHUNK]
    if int(chunks.max()) > 1:
        heads = discounted_sums(sums[:, 0], chunks, decay**CHUNK)
        inflow = heads.roll(-1)
        inflow[ends[chunks > 0] - 1] = 0.0
        sums += inflow[:, None] * powers[CHUNK - steps]
    return sums.view(-1)[slots]
