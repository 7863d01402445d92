"""GRPO's advantages: a sample's reward measured against the other samples of its prompt."""

from __future__ import annotations

import numpy as np

from fusionrl.algorithms.groups import SampleBatch

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
    """`r - mean(group)` -> [n]. Source: Dr. GRPO (arXiv 2503.20783)."""
    return batch.centered()
