"""Stage 1, pull: fetch this rank's shard, add other trainers' columns, refuse a shard that cannot be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.spans import span
from fusionrl.trainer.sample_columns import Columns
from fusionrl.weights.remote_calls import get

if TYPE_CHECKING:
    from ray import ObjectRef

    ShardSource: TypeAlias = "TrainShard | list[ObjectRef]"
    ColumnSource: TypeAlias = "Columns | ObjectRef"


def pull(source: ShardSource, columns: Sequence[ColumnSource] = ()) -> TrainShard:
    """Return the shard with a dict of fields of its own: trainers add to it, and in one process others may read it.

    source   the shard, or `[ref]` with a Ray reference to it
    columns  what `columns_of` gave on each data-parallel rank of the trainers that computed it, or references

    Raises ValueError for a sample without a prompt token, for nothing predicts the first token of a text.
    """
    with span("pull"):
        first = source[0] if isinstance(source, list) else source
        shard: TrainShard = first if isinstance(first, TrainShard) else get(first)
    bad = np.flatnonzero((shard.response_lengths > 0) & (shard.response_lengths >= shard.total_lengths))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"sample {int(shard.fields['sample_index'][i])} has {int(shard.total_lengths[i])} tokens, all of "
            "them response: the first token of a text is predicted by nothing; give the sample at least one "
            "prompt token"
        )
    return replace(shard, fields=shard.fields | _columns_for(shard, columns))


def _columns_for(shard: TrainShard, columns: Sequence[ColumnSource]) -> dict[str, np.ndarray]:
    """Name → flat array over the response tokens of the shard's samples."""
    merged: Columns = {}
    for part in columns:
        merged |= part if isinstance(part, dict) else get(part)
    names = next(iter(merged.values()), {})
    rows = [merged[position] for position in shard.fields["position"].tolist()] if columns else []
    return {name: np.concatenate([np.zeros(0, np.float32), *(row[name] for row in rows)]) for name in names}
