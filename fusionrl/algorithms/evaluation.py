"""Estimates of an evaluation: pass@k, and the error of a mean over samples that come in groups of one prompt."""

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054  # the normal distribution has 95 % of its mass within so many deviations


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples of a prompt is right, without bias from `num_samples` >= k drawn.

    1 - C(n - c, k) / C(n, k), eq. 1 of arXiv:2107.03374: the share of all subsets of k samples that hold a right one.
    ValueError: k is not in 1 … num_samples, or num_correct not in 0 … num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: k must be from 1 to the number of samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be right")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [1 << i for i in range(limit.bit_length())]


def clustered_error(values: Sequence[float] | np.ndarray, groups: Sequence[int] | np.ndarray) -> float | None:
    """The standard error of the mean of `values` [N], where values of one group (`groups` [N]) are not independent.

    With S_g the sum of a group's deviations from the mean and G groups: sqrt(G / (G - 1) * sum S_g²) / N, the
    clustered standard error of arXiv:2411.00640 with the usual correction for few groups. With groups of one size it is
    the deviation of the groups' means over sqrt(G). None for a single group.
    """
    deviations = np.asarray(values, np.float64) - np.mean(values)
    _, group = np.unique(groups, return_inverse=True)
    sums = np.bincount(group, deviations)
    if len(sums) < 2:
        return None
    return math.sqrt(len(sums) / (len(sums) - 1) * float(np.square(sums).sum())) / len(deviations)
