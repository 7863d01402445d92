"""PRIME: rewards of tokens from a reward model that is trained on outcomes alone.

The reward model is a language model whose log-ratio to a reference is read as the reward:
`r(y) = beta * log p_prm(y) / p_ref(y)` of a whole response, and by the same ratio of each token.
Source: PRIME (arXiv 2502.01456), after arXiv 2412.01981. The steps of one rollout: `implicit_rewards`,
`Responses.mean` of them, `leave_one_out` over all ranks' samples, `prime_advantages`, whitening.
"""

from torch import Tensor
from torch.nn.functional import softplus

from fusionrl.algorithms.log_ratio import comparable
from fusionrl.algorithms.responses import Responses
from fusionrl.algorithms.token_advantages import discounted_returns


def implicit_rewards(prm_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`beta * (log p_prm - log p_ref)` of each trained token [N]; 0 at untrained tokens.

    The gradient flows through the reward model's log-probs alone. The paper's beta is 0.05.

    Returns:
        (rewards [N], excluded []): a token with a log-prob that is not finite gets 0 and is counted.
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
    formula of the paper, which this is, does not.)

    Args:
        process_rewards: [N], of `implicit_rewards`, without gradient.
        process_baselines: [n], of `leave_one_out` over the samples' means.
        outcome_advantages: [n], of `rloo`.
        responses: the N tokens' samples and mask.
        gamma, process_coef, outcome_coef: discount of the process rewards; weights of the two parts.

    Returns:
        [N], of the type of `process_rewards`; 0 at untrained tokens. To be whitened.

    Raises:
        ValueError: a process reward that is not finite.
    """
    centered = responses.pick(process_rewards, "process reward") - process_baselines.double()[responses.sample]
    process = discounted_returns(responses.place(centered, centered.dtype), responses, gamma)
    total = process_coef * process + outcome_coef * responses.spread(outcome_advantages.double())
    return total.to(process_rewards.dtype)


def implicit_reward_loss(rewards: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the reward model: `-(y log s(r) + (1 - y) log s(-r))`, s the sigmoid -> [S].

    Args:
        rewards: [S], the sums of `implicit_rewards` over each whole sequence. Where a sequence's tokens are spread
            over ranks, sum over these first, by a sum that carries the gradient back. An empty sequence has 0 and
            its loss log 2, without gradient.
        labels: [S], 1 where the outcome is right, 0 where it is wrong; or a share of it.

    Raises:
        ValueError: a label outside of 0 … 1.
    """
    wrong = ~((labels >= 0) & (labels <= 1))
    if wrong.any():
        raise ValueError(f"the outcome {float(labels[wrong][0])} must be from 0 (wrong) to 1 (right)")
    return softplus(rewards) - labels * rewards
