"""Stage 1, pull: fetch this rank's shard, add other trainers' columns, refuse a shard that cannot be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.spans import span
from fusionrl.trainer.shared_columns import Columns
from fusionrl.weights.in_process import get
from fusionrl.weights.remote_calls import Reference

if TYPE_CHECKING:
    from ray import ObjectRef

    ShardSource: TypeAlias = "TrainShard | list[ObjectRef]"
    ColumnSource: TypeAlias = "Columns | ObjectRef"

T = TypeVar("T")


def pull(source: ShardSource, columns: Sequence[ColumnSource] = ()) -> TrainShard:
    """Return the shard with a dict of fields of its own: trainers add to it, and in one process others may read it.

    Args:
        source: the shard, or `[ref]` with a Ray reference to it.
        columns: what `columns_of` gave on each data-parallel rank of the trainers that computed it, or references.

    Raises:
        ValueError: a shard that no loss can be computed from.
    """
    with span("pull"):
        shard: TrainShard = source if isinstance(source, TrainShard) else _fetched(source[0])
    check_shard(shard)
    fields = shard.fields | _columns_for(shard, columns)
    return TrainShard(
        rollout_id=shard.rollout_id,
        total_lengths=shard.total_lengths,
        response_lengths=shard.response_lengths,
        fields=fields,
        steps=shard.steps,
        metadata=shard.metadata,
        extra=shard.extra,
    )


def check_shard(shard: TrainShard) -> None:
    """Refuse a shard that no loss can be computed from.

    Raises:
        ValueError: a sample without a prompt token, for nothing predicts the first token of a text.
    """
    bad = np.flatnonzero((shard.response_lengths > 0) & (shard.response_lengths >= shard.total_lengths))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"sample {int(shard.fields['sample_index'][i])} has {int(shard.total_lengths[i])} tokens, all of "
            "them response: the first token of a text is predicted by nothing; give the sample at least one "
            "prompt token"
        )


def _columns_for(shard: TrainShard, columns: Sequence[ColumnSource]) -> dict[str, np.ndarray]:
    """Name → flat array over the response tokens of the shard's samples."""
    merged: Columns = {}
    for part in columns:
        merged |= part if isinstance(part, dict) else _fetched(part)
    names = next(iter(merged.values()), {})
    rows = [merged[position] for position in shard.fields["position"].tolist()] if columns else []
    return {name: np.concatenate([np.zeros(0, np.float32), *(row[name] for row in rows)]) for name in names}


def _fetched(reference: Reference[T]) -> T:
    return get(reference)
