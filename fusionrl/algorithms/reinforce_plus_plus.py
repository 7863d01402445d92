"""REINFORCE++'s variant with groups, for the mean alone; it is whitened over the whole batch (`whitening.py`).

Without groups it takes `returns.py`. Nothing here needs torch: the Buffer and the driver import it.
"""

from __future__ import annotations

import numpy as np

from fusionrl.algorithms.groups import SampleBatch


def reinforce_plus_plus_baseline(batch: SampleBatch) -> np.ndarray:
    """`r - mean(group)` -> [n], to be spread over the tokens and whitened (`whitening.py`).

    Source: REINFORCE++ (arXiv 2501.03262), its variant with a baseline.
    """
    return batch.centered()
