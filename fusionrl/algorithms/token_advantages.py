"""Advantages and returns of tokens: discounted returns (REINFORCE++), GAE (PPO), process rewards (PRIME), whitening.

All run over each sample's trained tokens; how untrained ones count: see `Responses`.

PRIME (arXiv 2502.01456, after arXiv 2412.01981) trains a language model on outcomes and reads its log-ratio to a
reference as the reward `beta * log p_prm(y) / p_ref(y)` of a response, and of each token. The steps of one rollout:
`implicit_rewards`, `Responses.mean` of them, `leave_one_out` over all ranks' samples, `prime_advantages`, whitening.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fusionrl.algorithms.divergence import KL_ESTIMATORS, comparable
from fusionrl.algorithms.sequences import Responses

CHUNK = 128


def score_rewards(scores: Tensor, responses: Responses) -> Tensor:
    """Each sample's score [n] on its last trained token, if it has one -> [N]. ValueError: a score is not finite."""
    if not scores.isfinite().all():
        bad = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(f"reward {float(scores[bad])} of sample {bad} is not finite")
    rewards = scores.new_zeros(responses.mask.numel())
    rewards[responses.positions[responses.last]] = scores[responses.counts > 0]
    return rewards


def kl_rewards(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str, coef: float) -> tuple[Tensor, Tensor]:
    """`-coef * KL` of each trained token [N], by the estimator `kind` of `divergence.py`; 0 at untrained tokens.

    Source: InstructGPT (arXiv 2203.02155), equation 2, its beta term. ValueError: the estimate of finite log-probs
    overflows. A token with a log-prob that is not finite gets 0 and is counted -> (rewards [N], excluded []).
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

    Source: GAE (arXiv 1506.02438), equation 16. ValueError: a reward or value that is not finite, or a reward on an
    untrained token.

    values       [N], the critic's value before each token; anything at untrained tokens
    last_values  [n], the value after a response's last token; None is 0 for all, as if each response had ended by
                 itself, a truncated one too; see `truncated_values`

    Returns (advantages [N], returns [N]), `returns = advantages + values`, the critic's target; 0 at untrained tokens.
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
    with `decay^128`, and so on: 32k tokens take three rounds. `values` [N] are flat, one sequence after the other, of
    these `lengths` [n] int64 -> [N], of the type of `values`.
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


EPSILON = 1e-8


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of `values` [N] where `mask` [N] is not 0 -> [3] float64.

    They add up over ranks and parts. A value that is not finite goes into the sums: see `whiten`.
    """
    picked = values[mask != 0].double()
    return torch.stack([picked.new_tensor(float(picked.numel())), picked.sum(), picked.square().sum()])


def whiten(values: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """`(x - mean) / sqrt(variance + 1e-8)` [N] where `mask` is not 0, else 0; the variance is the unbiased one (n - 1).

    `total` [3] are the `moments` of the whole batch. A batch of one token, or of equal ones, has no deviation: its
    values become 0, as far as rounding goes. ValueError: a value in the batch is not finite; on every rank at once, for
    all have the same `total`.
    """
    count, first, second = total.double().tolist()
    if not torch.isfinite(total).all():
        raise ValueError("advantages to be whitened are not finite: see the rewards, values and log-probs they are of")
    mean = first / max(count, 1.0)
    variance = max(second - count * mean**2, 0.0) / max(count - 1.0, 1.0)
    scaled = (values.double() - mean) / (variance + EPSILON) ** 0.5
    return torch.where(mask != 0, scaled, 0.0).to(values.dtype)


def implicit_rewards(prm_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`beta * (log p_prm - log p_ref)` of each trained token [N]; 0 at untrained tokens.

    The gradient flows through the reward model's log-probs alone. The paper's beta is 0.05. A token with a log-prob
    that is not finite gets 0 and is counted -> (rewards [N], excluded []).
    """
    prm, reference, excluded = comparable(prm_log_probs, ref_log_probs.detach(), mask)
    return beta * (prm - reference), excluded


def prime_advantages(
    process_rewards: Tensor,
    process_baselines: Tensor,
    outcome_advantages: Tensor,
    responses: Responses,
    gamma: float = 1.0,
    process_coef: float = 1.0,
    outcome_coef: float = 1.0,
) -> Tensor:
    """`sum_{s >= t} gamma^(s-t) (r_s - b)` of the process rewards plus the outcome's RLOO advantage.

    b is the mean over the group's other samples of their mean process reward. The two are made apart, for one is of
    tokens and one of samples, and added. (The authors' program scales `r_s - mean` by K / (K - 1); the
    formula of the paper, which this is, does not.) ValueError: a process reward that is not finite.

    process_rewards     [N], of `implicit_rewards`, without gradient
    process_baselines   [n], of `leave_one_out` over the samples' means
    outcome_advantages  [n], of `rloo`

    Returns [N], 0 at untrained tokens, to be whitened.
    """
    centered = responses.pick(process_rewards, "process reward") - process_baselines.double()[responses.sample]
    process = discounted_returns(responses.place(centered, centered.dtype), responses, gamma)
    total = process_coef * process + outcome_coef * responses.spread(outcome_advantages.double())
    return total.to(process_rewards.dtype)


def implicit_reward_loss(rewards: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the reward model: `-(y log s(r) + (1 - y) log s(-r))`, s the sigmoid -> [S].

    rewards  [S], the sums of `implicit_rewards` over each whole sequence. Where a sequence's tokens are spread over
             ranks, sum over these first, by a sum that carries the gradient back. An empty sequence has 0 and its loss
             log 2, without gradient
    labels   [S], 1 where the outcome is right, 0 where it is wrong, or a share of it; ValueError: outside of 0 … 1
    """
    wrong = ~((labels >= 0) & (labels <= 1))
    if wrong.any():
        raise ValueError(f"the outcome {float(labels[wrong][0])} must be from 0 (wrong) to 1 (right)")
    return softplus(rewards) - labels * rewards
