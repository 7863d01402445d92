"""Values per token or sample that one group of trainers hands to another, whose shards are cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionrl.data.train_batch import TrainShard

Columns = dict[int, dict[str, np.ndarray]]  # position of a sample in the rollout -> name -> [response_length]
# The same with one value a sample, or with --save-token-values also one a response token, NaN where none is known.
SampleColumns = dict[int, dict[str, float | int | np.ndarray]]
Handed = tuple[dict[str, float], Columns]  # metrics for the driver; columns, which it passes on unseen


def columns_of(shard: TrainShard, names: Sequence[str]) -> Columns:
    """Columns of a shard by the samples' positions."""
    parts = {name: shard.split(name)[: shard.num_samples] for name in names}
    positions = shard.fields["position"].tolist()
    return {position: {name: parts[name][i] for name in names} for i, position in enumerate(positions)}
