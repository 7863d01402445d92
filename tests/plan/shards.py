"""The shards of a rollout, as a list."""

from collections.abc import Sequence
from typing import Any

from fusionrl.buffer.train_shards import TrainingSamples, take_shards
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard


def build_shards(samples: Sequence[Sample], rewards: Any, raw: Any, *plan: Any, **named: Any) -> list[TrainShard]:
    return list(take_shards(TrainingSamples(list(samples), rewards, raw), *plan, **named))
