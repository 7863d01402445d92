"""OPO: the baseline that makes the gradient's variance smallest."""

from __future__ import annotations

import numpy as np

from fusionrl.algorithms.groups import SampleBatch


def opo(batch: SampleBatch) -> np.ndarray:
    """`r - sum_j l_j r_j / sum_j l_j` over the group, with l the lengths -> [n].

    The squared norm of a sample's gradient is taken to grow with its length. Source: OPO (arXiv 2505.23585).

    Raises:
        ValueError: no lengths, or one that is negative.
    """
    lengths = None if batch.lengths is None else np.asarray(batch.lengths, np.float64)
    if lengths is None or lengths.shape != batch.rewards.shape or not (lengths >= 0).all():
        raise ValueError(f"OPO weighs {batch.rewards.size} rewards by their samples' lengths >= 0, not by {lengths}")
    return batch.centered(lengths)
