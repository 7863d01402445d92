"""A rollout's samples in their groups, as advantages of whole samples see them."""

from __future__ import annotations

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
    largest_group: int = field(init=False, default=0)  # samples, those without a reward included

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
        object.__setattr__(self, "largest_group", int(counts.max(initial=0)))
        if self.scored is not None:
            group = np.where(self.scored, group, len(counts) + np.arange(len(group)))
        object.__setattr__(self, "rewards", rewards)
        object.__setattr__(self, "group_index", group)

    @cached_property
    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Group of each sample from 0 on [n], and the members of each group [g]."""
        _, group, counts = np.unique(self.group_index, return_inverse=True, return_counts=True)
        return group, counts

    @property
    def group_sizes(self) -> np.ndarray:
        """Members of each sample's group [n]."""
        group, counts = self.groups
        return counts[group]

    def centered(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Rewards minus their group's mean, weighted by `weights` [n] >= 0 where given -> [n].

        A group of one, and one whose rewards are all equal, says nothing about which answer was better: its
        values are exactly 0. A group whose weights are all 0 is weighted evenly.
        """
        group, counts = self.groups
        if weights is None:
            weights = np.ones_like(self.rewards)
        weights = np.where(np.bincount(group, weights)[group] > 0, weights, 1.0)
        mean = np.bincount(group, weights * self.rewards) / np.bincount(group, weights)
        # The mean of equal floats need not be equal to them; divided by a small deviation the rounding would
        # become a signal.
        lowest, highest = np.full(counts.shape, np.inf), np.full(counts.shape, -np.inf)
        np.minimum.at(lowest, group, self.rewards)
        np.maximum.at(highest, group, self.rewards)
        return np.where((lowest == highest)[group], 0.0, self.rewards - mean[group])
