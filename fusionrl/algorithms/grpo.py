"""GRPO's advantages: a sample's reward measured against the other samples of its prompt."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


def group_normalize(rewards: np.ndarray, group_index: np.ndarray, divide_by_std: bool = True) -> np.ndarray:
    """Advantage of each sample: `(r - mean(group)) / (std(group) + 1e-6)`.

    The deviation is the unbiased one (n - 1). A group of one sample, and a group whose rewards are all
    equal, says nothing about which answer was better: its advantages are exactly 0. Source: DeepSeekMath
    (arXiv 2402.03300), section 4.1.2; leaving the division out (`divide_by_std=False`) is Dr. GRPO's (arXiv
    2503.20783).

    Args:
        rewards: [n] rewards, any real type.
        group_index: [n] group of each sample; members of a group need not stand together.
        divide_by_std: whether to divide by the group's deviation.

    Returns:
        [n] float64 advantages, in the order of `rewards`.

    Raises:
        ValueError: shapes that differ, or a reward that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    group_index = np.asarray(group_index)
    if rewards.ndim != 1 or rewards.shape != group_index.shape:
        raise ValueError(f"rewards {rewards.shape} and group_index {group_index.shape} must be two equal 1-d shapes")
    if not np.isfinite(rewards).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(f"reward {rewards[bad]} of sample {bad} is not finite; a reward function must return a number")
    _, group, counts = np.unique(group_index, return_inverse=True, return_counts=True)
    centered = rewards - (np.bincount(group, weights=rewards) / np.maximum(counts, 1))[group]
    # The mean of equal floats need not be equal to them; divided by 1e-6 the rounding would become a signal.
    lowest = np.full(counts.shape, np.inf)
    highest = np.full(counts.shape, -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    centered[(lowest == highest)[group]] = 0.0
    if not divide_by_std:
        return centered
    variance = np.bincount(group, weights=centered**2) / np.maximum(counts - 1, 1)
    return centered / (np.sqrt(variance) + EPSILON)[group]
