"""Token stages of the estimators: from the values of whole samples to an advantage for each response token.

A token stage runs in the trainers, on one rank's samples. It gets `TokenInputs` and returns `TokenAdvantages`.
torch is imported inside the functions: the table of estimators is read by the command line and the Buffer, which start
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fusionrl.algorithms.responses import Responses


@dataclass(frozen=True)
class TokenOptions:
    """Constants of the token stages; each stage reads its own.

    gamma, lambd    discount of token rewards; lambda of GAE
    bootstraps      a truncated response is worth its last value, not 0
    kl_coef, kl_type           price of a nat of KL to the reference, and the estimator of that KL (`kl.py`)
    process_coef, outcome_coef weights of PRIME's two parts
    """

    gamma: float = 1.0
    lambd: float = 1.0
    bootstraps: bool = False
    kl_coef: float = 0.0
    kl_type: str = "k1"
    process_coef: float = 1.0
    outcome_coef: float = 1.0


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """One rank's n samples with N response tokens.

    values          [n] of the group stage, or the rewards where an estimator has none
    responses       the N tokens' samples and mask
    columns         the rest: log_probs, ref_log_probs, values (a critic's), process_rewards [N]; truncated [n]
    options         see `TokenOptions`
    mean_of_others  [n] -> [n]: of each sample the mean over the other samples of its group, on any rank
    """

    values: Tensor
    responses: Responses
    columns: Mapping[str, Tensor]
    options: TokenOptions
    mean_of_others: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TokenAdvantages:
    """The result of a token stage.

    advantages  [N]; 0 at untrained tokens
    returns     [N], a critic's targets; None: no critic
    kl          [2] float64: the sum of the KL to the reference over trained tokens, and how many tokens were left out
                because a log-prob was not finite; None: KL has no price
    """

    advantages: Tensor
    returns: Tensor | None = None
    kl: Tensor | None = None


TokenStage = Callable[[TokenInputs], TokenAdvantages]


def spread(inputs: TokenInputs) -> TokenAdvantages:
    """Give each trained token the value of its sample."""
    return TokenAdvantages(inputs.responses.spread(inputs.values))


def discounted(inputs: TokenInputs) -> TokenAdvantages:
    """Sum the rewards that follow a token, discounted (REINFORCE++)."""
    from fusionrl.algorithms.token_advantages import discounted_returns

    rewards, kl = _token_rewards(inputs)
    return TokenAdvantages(discounted_returns(rewards, inputs.responses, inputs.options.gamma), kl=kl)


def critic(inputs: TokenInputs) -> TokenAdvantages:
    """Compare the rewards that follow a token with the critic's value (PPO, GAE)."""
    from fusionrl.algorithms.token_advantages import gae, truncated_values

    (rewards, kl), options = _token_rewards(inputs), inputs.options
    values, last = inputs.columns["values"], None
    if options.bootstraps:
        last = truncated_values(values, inputs.responses, inputs.columns["truncated"])
    advantages, returns = gae(rewards, values, inputs.responses, options.gamma, options.lambd, last)
    return TokenAdvantages(advantages, returns, kl)


def process(inputs: TokenInputs) -> TokenAdvantages:
    """Add the process rewards that follow a token to its sample's value (PRIME)."""
    from fusionrl.algorithms.prime import prime_advantages

    rewards, options = inputs.columns["process_rewards"], inputs.options
    baselines = inputs.mean_of_others(inputs.responses.mean(rewards, "process reward"))
    coefs = (options.gamma, options.process_coef, options.outcome_coef)
    return TokenAdvantages(prime_advantages(rewards, baselines, inputs.values, inputs.responses, *coefs))


def _token_rewards(inputs: TokenInputs) -> tuple[Tensor, Tensor | None]:
    """(rewards of tokens [N]: the sample's at its end, less the price of KL; `TokenAdvantages.kl`)."""
    import torch

    from fusionrl.algorithms.token_advantages import kl_rewards, score_rewards

    rewards, options, columns = score_rewards(inputs.values, inputs.responses), inputs.options, inputs.columns
    if options.kl_coef <= 0:
        return rewards, None
    log_probs, mask = (columns["log_probs"], columns["ref_log_probs"]), inputs.responses.mask
    price, excluded = kl_rewards(*log_probs, mask, options.kl_type, options.kl_coef)
    return rewards + price, torch.stack([-price.double().sum() / options.kl_coef, excluded.double()])
