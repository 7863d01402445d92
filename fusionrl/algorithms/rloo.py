"""Leave-one-out baselines: each sample is measured against the mean of the others of its group."""

from __future__ import annotations

import numpy as np

from fusionrl.algorithms.groups import SampleBatch


def rloo(batch: SampleBatch) -> np.ndarray:
    """`r_i - sum_{j != i} r_j / (K - 1)` in a group of K -> [n]; 0 in a group of one.

    Source: RLOO (arXiv 2402.14740). The same as `K / (K - 1) * (r_i - mean(group))`.
    """
    sizes = batch.group_sizes
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
