"""What one group of trainers finds out about a rollout's tokens, for another whose shards are cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusionrl.data.train_batch import TrainShard

Columns = dict[int, dict[str, np.ndarray]]  # position of a sample in the rollout -> name -> [response_length]


def columns_of(shard: TrainShard, names: Sequence[str]) -> Columns:
    """Columns of a shard by the samples' positions, for trainers whose shards are cut otherwise."""
    parts = {name: shard.split(name)[: shard.num_samples] for name in names}
    positions = shard.fields["position"].tolist()
    return {position: {name: parts[name][i] for name in names} for i, position in enumerate(positions)}


def take_columns(shard: TrainShard, columns: Sequence[Any]) -> None:
    """Add to the shard what `columns_of` gave of all ranks' shards; references are pulled."""
    whole: Columns = {}
    for part in columns:
        if not isinstance(part, dict):
            import ray

            part = ray.get(part)
        whole |= part
    found = [whole[position] for position in shard.fields["position"].tolist()]
    for name in next(iter(whole.values()), {}):
        shard.fields[name] = np.concatenate([np.zeros(0, np.float32), *(one[name] for one in found)])


def pull(shard: TrainShard | list[Any]) -> TrainShard:
    """The shard; of `[ref]` that which the Ray reference leads to."""
    if isinstance(shard, TrainShard):
        return shard
    import ray

    return ray.get(shard[0])
