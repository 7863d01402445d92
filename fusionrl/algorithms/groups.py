"""A rollout's samples in their groups, as advantages of whole samples see them."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


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

    Raises:
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
            raise ValueError(
                f"rewards {rewards.shape} and group_index {group_index.shape} must be two equal 1-d shapes"
            )
        if not np.isfinite(rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(
                f"reward {rewards[bad]} of sample {bad} is not finite; a reward function must return a number"
            )
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

    @property
    def group_sizes(self) -> np.ndarray:
        """Attempts of each sample's group [n]."""
        group, counts = self.groups
        return counts[group]

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
