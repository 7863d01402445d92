"""ReMax: the greedy answer's reward is the baseline."""

from __future__ import annotations

import numpy as np

from fusionrl.algorithms.groups import SampleBatch


def remax(batch: SampleBatch) -> np.ndarray:
    """`r - b`, b the reward of the greedy answer to the same prompt -> [n]; a group of one is as good as any.

    Source: ReMax (arXiv 2310.10505).

    Raises:
        ValueError: no baselines, or one that is not finite.
    """
    if batch.baselines is None or np.shape(batch.baselines) != batch.rewards.shape:
        raise ValueError(
            f"ReMax needs the reward of a greedy answer for each of {batch.rewards.size} samples, "
            f"not {'none' if batch.baselines is None else np.shape(batch.baselines)}"
        )
    baselines = np.asarray(batch.baselines, np.float64)
    if not np.isfinite(baselines).all():
        bad = int(np.flatnonzero(~np.isfinite(baselines))[0])
        raise ValueError(f"the greedy answer's reward {baselines[bad]} for sample {bad} is not finite")
    return batch.rewards - baselines
