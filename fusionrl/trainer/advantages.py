"""The advantage of each response token, of one rank's shard."""

from __future__ import annotations

import numpy as np

from fusionrl.data.train_batch import TrainShard


def spread_rewards(shard: TrainShard) -> np.ndarray:
    """[response tokens] fp32: a sample's reward at each of its tokens, as estimators of whole samples have it."""
    return np.repeat(shard.fields["rewards"], shard.response_lengths)
