"""Stages of the advantage estimators. Nothing here imports torch when it is loaded.

A group stage runs in the Buffer, which knows all samples of a rollout: it gets a `SampleBatch` and returns a value for
each sample, measured against the others of its prompt. A token stage runs in the trainers, on one rank's samples: it
gets `TokenInputs` and returns `TokenAdvantages`. The table of estimators names both; the command line and the Buffer
read it, and start without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fusionrl.algorithms.sequences import Responses


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """The n samples of a rollout; members of a group need not stand together, and groups may differ in size.

    rewards      [n], any real type; float64 from here on
    group_index  [n] group of each sample
    lengths      [n] tokens of each sample that are trained on, for those who weigh by them
    baselines    [n] reward of the greedy answer to the sample's prompt, for ReMax
    k            how many answers pass@k counts as one try
    attempts     [n] samples of one attempt have the same number; each attempt counts once in its group, with the mean
                 of its samples' rewards. None: every sample is an attempt
    scored       [n] bool, False: the sample has no reward (it failed or was aborted). It is in no group's mean or
                 deviation: from here on it is a group of its own. None: all have one

    ValueError: shapes that differ, or a reward that is not finite.
    """

    rewards: np.ndarray
    group_index: np.ndarray
    lengths: np.ndarray | None = None
    baselines: np.ndarray | None = None
    k: int = 1
    scored: np.ndarray | None = None
    attempts: np.ndarray | None = None
    largest_group: int = field(init=False, default=0)  # attempts, those without a reward included
    attempt: np.ndarray = field(init=False)  # [n] numbers from 0 on; a sample without a reward is an attempt of its own

    def __post_init__(self) -> None:
        rewards, group_index = np.asarray(self.rewards, np.float64), np.asarray(self.group_index)
        if rewards.ndim != 1 or rewards.shape != group_index.shape:
            raise ValueError(f"rewards {rewards.shape}, group_index {group_index.shape}: give two equal 1-d shapes")
        if not np.isfinite(rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(f"reward {rewards[bad]} of sample {bad} is not finite; reward functions return a number")
        _, group, counts = np.unique(group_index, return_inverse=True, return_counts=True)
        attempts = np.arange(len(rewards)) if self.attempts is None else np.asarray(self.attempts)
        _, firsts = np.unique(attempts, return_index=True)
        object.__setattr__(self, "largest_group", int(np.bincount(group[firsts]).max(initial=0)))
        if self.scored is not None:
            group = np.where(self.scored, group, len(counts) + np.arange(len(group)))
            attempts = np.where(self.scored, attempts, len(attempts) + np.arange(len(attempts)))
        object.__setattr__(self, "attempt", np.unique(attempts, return_inverse=True)[1])
        object.__setattr__(self, "rewards", rewards)
        object.__setattr__(self, "group_index", group)

    @cached_property
    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Group of each sample from 0 on [n], and the attempts of each group [g]."""
        _, group = np.unique(self.group_index, return_inverse=True)
        _, firsts = np.unique(self.attempt, return_index=True)
        return group, np.bincount(group[firsts])

    @cached_property
    def shares(self) -> np.ndarray:
        """1 / (samples of the sample's attempt) [n]."""
        return 1.0 / np.bincount(self.attempt)[self.attempt] if self.rewards.size else np.zeros(0)

    def centered(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Rewards minus their group's mean, over attempts or weighted by `weights` [n] >= 0 -> [n].

        A group of one, and one whose rewards are all equal, says nothing about which answer was better: its
        values are exactly 0. A group whose weights are all 0 is weighted evenly.
        """
        group, counts = self.groups
        if weights is None:
            weights = self.shares
        weights = np.where(np.bincount(group, weights)[group] > 0, weights, self.shares)
        mean = np.bincount(group, weights * self.rewards) / np.bincount(group, weights)
        # The mean of equal floats need not be equal to them; divided by a small deviation the rounding would
        # become a signal.
        lowest, highest = np.full(counts.shape, np.inf), np.full(counts.shape, -np.inf)
        np.minimum.at(lowest, group, self.rewards)
        np.maximum.at(highest, group, self.rewards)
        return np.where((lowest == highest)[group], 0.0, self.rewards - mean[group])


EPSILON = 1e-6


def grpo(batch: SampleBatch) -> np.ndarray:
    """`(r - mean(group)) / (std(group) + 1e-6)`, with the unbiased deviation (n - 1) -> [n].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    centered = batch.centered()
    group, counts = batch.groups
    variance = np.bincount(group, weights=batch.shares * centered**2) / np.maximum(counts - 1, 1)
    return centered / (np.sqrt(variance) + EPSILON)[group]


def dr_grpo(batch: SampleBatch) -> np.ndarray:
    """`r - mean(group)` -> [n].

    Sources: Dr. GRPO (arXiv 2503.20783); REINFORCE++ (arXiv 2501.03262), its variant with a baseline, whitens it.
    """
    return batch.centered()


def rloo(batch: SampleBatch) -> np.ndarray:
    """`r_i - sum_{j != i} r_j / (K - 1)` in a group of K -> [n]; 0 in a group of one.

    Source: RLOO (arXiv 2402.14740). The same as `K / (K - 1) * (r_i - mean(group))`.
    """
    group, counts = batch.groups
    sizes = counts[group]
    return batch.centered() * sizes / np.maximum(sizes - 1, 1)


def leave_one_out(values: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """The mean of the others' `values` in each sample's group: [n], [n] -> [n].

    A NaN is a sample without a value (none of its tokens is trained on) and is counted in no mean. A sample that
    is left alone so is its own baseline; that of a lone NaN is 0, and belongs to no token.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    _, group = np.unique(group_index, return_inverse=True)
    filled = np.where(known, values, 0.0)
    group_rest = np.bincount(group, filled)[group] - filled
    count = np.bincount(group, known)[group] - known
    return np.where(count > 0, group_rest / np.maximum(count, 1), filled)


def remax(batch: SampleBatch) -> np.ndarray:
    """`r - b`, b the reward of the greedy answer to the same prompt -> [n]; a group of one is as good as any.

    Source: ReMax (arXiv 2310.10505). ValueError: no baselines, or one that is not finite.
    """
    if batch.baselines is None or np.shape(batch.baselines) != batch.rewards.shape:
        raise ValueError(f"ReMax needs the reward of a greedy answer for each of {batch.rewards.size} samples")
    baselines = np.asarray(batch.baselines, np.float64)
    if not np.isfinite(baselines).all():
        bad = int(np.flatnonzero(~np.isfinite(baselines))[0])
        raise ValueError(f"the greedy answer's reward {baselines[bad]} for sample {bad} is not finite")
    return batch.rewards - baselines


def opo(batch: SampleBatch) -> np.ndarray:
    """`r - sum_j l_j r_j / sum_j l_j` over the group, with l the lengths -> [n]: the baseline of least variance.

    The squared norm of a sample's gradient is taken to grow with its length. Source: OPO (arXiv 2505.23585).
    ValueError: no lengths, or one that is negative.
    """
    lengths = None if batch.lengths is None else np.asarray(batch.lengths, np.float64)
    if lengths is None or lengths.shape != batch.rewards.shape or not (lengths >= 0).all():
        raise ValueError(f"OPO weighs {batch.rewards.size} rewards by their samples' lengths >= 0, not by {lengths}")
    return batch.centered(lengths)


def pass_at_k_advantages(batch: SampleBatch) -> np.ndarray:
    """Mean advantage of each sample over all teams of k samples of its group -> [n], which trains pass@k.

    An attempt of several samples counts as one: it is right if all of its samples are, and each has its advantage.
    A team's reward is 1 if one of its answers is right, else 0; its advantage is the reward normalised by mean and
    deviation over all teams. With c of n samples right, `p = 1 - C(n - c, k) / C(n, k)` and
    `s = sqrt(p (1 - p))`, a right sample has `(1 - p) / s`, a wrong one
    `(1 - p - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / s`.
    Source: "Pass@k Training" (arXiv 2508.10751), its analytical derivation.

    Where all teams fare alike (s = 0) and in a group smaller than k, which has no team, the advantages are 0.
    ValueError: a reward that is neither 1 (right) nor 0 or -1 (wrong), k below 1, or no group of k samples.
    """
    rewards, k = batch.rewards, batch.k
    bad = np.flatnonzero(~np.isin(rewards, (1.0, 0.0, -1.0)))
    if bad.size:
        raise ValueError(
            f"reward {rewards[bad[0]]} of sample {bad[0]}: pass@k takes 1 for a right answer and 0 or -1 for a wrong"
        )
    group, counts = batch.groups
    if k < 1 or (counts.size and k > batch.largest_group):
        raise ValueError(
            f"pass@{k} advantages of groups of at most {batch.largest_group} samples: k must be from 1 to "
            "--n-samples-per-prompt"
        )
    # [n] whether the sample's attempt is right: none of its samples is wrong
    right = np.bincount(batch.attempt, rewards != 1.0, minlength=1)[batch.attempt] == 0
    num_right = np.rint(np.bincount(group, right * batch.shares)).astype(int)
    advantages = np.zeros_like(rewards)
    for g, (n, c) in enumerate(zip(counts.tolist(), num_right.tolist(), strict=True)):
        if n < k or c == 0 or n - c < k:
            continue
        missed = math.comb(n - c, k) / math.comb(n, k)  # 1 - p
        deviation = math.sqrt(missed * (1.0 - missed))
        wrong = missed - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
        advantages[group == g] = np.where(right[group == g], missed, wrong) / deviation
    return advantages


@dataclass(frozen=True)
class TokenOptions:
    """Constants of the token stages, the flags of their names; each stage reads its own."""

    gamma: float = 1.0
    lambd: float = 1.0
    bootstrap_truncated: bool = False
    kl_coef: float = 0.0
    kl_coef_type: str = "k1"
    prm_process_coef: float = 1.0
    prm_outcome_coef: float = 1.0


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
    if options.bootstrap_truncated:
        last = truncated_values(values, inputs.responses, inputs.columns["truncated"])
    advantages, returns = gae(rewards, values, inputs.responses, options.gamma, options.lambd, last)
    return TokenAdvantages(advantages, returns, kl)


def process(inputs: TokenInputs) -> TokenAdvantages:
    """Add the process rewards that follow a token to its sample's value (PRIME)."""
    from fusionrl.algorithms.token_advantages import prime_advantages

    rewards, options = inputs.columns["process_rewards"], inputs.options
    baselines = inputs.mean_of_others(inputs.responses.mean(rewards, "process reward"))
    coefs = (options.gamma, options.prm_process_coef, options.prm_outcome_coef)
    return TokenAdvantages(prime_advantages(rewards, baselines, inputs.values, inputs.responses, *coefs))


def _token_rewards(inputs: TokenInputs) -> tuple[Tensor, Tensor | None]:
    """(rewards of tokens [N]: the sample's at its end, less the price of KL; `TokenAdvantages.kl`)."""
    import torch

    from fusionrl.algorithms.token_advantages import kl_rewards, score_rewards

    rewards, options, columns = score_rewards(inputs.values, inputs.responses), inputs.options, inputs.columns
    if options.kl_coef <= 0:
        return rewards, None
    log_probs, mask = (columns["log_probs"], columns["ref_log_probs"]), inputs.responses.mask
    price, excluded = kl_rewards(*log_probs, mask, options.kl_coef_type, options.kl_coef)
    return rewards + price, torch.stack([-price.double().sum() / options.kl_coef, excluded.double()])
