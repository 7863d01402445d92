"""A rank's shard of a rollout: the stages that it passes, and columns that go from and to other trainers.

    pull        TrainShard, of which this rank may change the fields
    score       Prepared: log-probs of before the first step, as far as loss and advantages need them
    advantages  Prepared: everything that the loss needs
    pack        the micro-batches of each optimizer step, once the step before is taken
    steps       a StepReport for each; then the rollout's metrics

Hooks are called at the borders between the stages (`train_hooks.py`). A critic and a process reward model have no
advantages; their shards are prepared when they are pulled and scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fusionrl.data.train_batch import TrainShard, joined
from fusionrl.observe.spans import span
from fusionrl.weights.remote_calls import get

if TYPE_CHECKING:
    from ray import ObjectRef
    from torch import Tensor

Columns = dict[int, dict[str, np.ndarray]]  # position of a sample in the rollout -> name -> [response_length]
# The same with one value a sample, or with --save-token-values also one a response token, NaN where none is known.
SampleColumns = dict[int, dict[str, float | int | np.ndarray]]
Handed = tuple[dict[str, float], Columns]  # metrics for the driver; columns, which it passes on unseen
# The experts that routers chose when they were recorded: samples of a micro-batch → [tokens, mixtures, topk].
Experts: TypeAlias = "dict[tuple[int, ...], Tensor]"
ShardSource: TypeAlias = "TrainShard | list[ObjectRef]"
ColumnSource: TypeAlias = "Columns | ObjectRef"


@dataclass(frozen=True)
class Prepared:
    """A shard with columns that were added, the experts that were recorded, and metrics of its making (no prefix)."""

    shard: TrainShard
    experts: Experts = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def pull(source: ShardSource, columns: Sequence[ColumnSource] = ()) -> TrainShard:
    """Return the shard with a dict of fields of its own: trainers add to it, and in one process others may read it.

    source   the shard, or Ray references to one or to several, which are joined
    columns  what `columns_of` gave on each data-parallel rank of the trainers that computed it, or references

    Raises ValueError for a sample without a prompt token, for nothing predicts the first token of a text.
    """
    with span("pull"):
        parts = source if isinstance(source, list) else [source]
        shard = joined([part if isinstance(part, TrainShard) else get(part) for part in parts])
    bad = np.flatnonzero((shard.response_lengths > 0) & (shard.response_lengths >= shard.total_lengths))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"sample {int(shard.fields['sample_index'][i])} has {int(shard.total_lengths[i])} tokens, all of "
            "them response: the first token of a text is predicted by nothing; give the sample at least one "
            "prompt token"
        )
    fields = dict(shard.fields)
    merged: Columns = {}
    for part in columns:
        merged |= part if isinstance(part, dict) else get(part)
    for name in next(iter(merged.values()), {}):
        rows = [merged[position][name] for position in fields["position"].tolist()]
        fields[name] = np.concatenate([np.zeros(0, np.float32), *rows])
    return replace(shard, fields=fields)


def columns_of(shard: TrainShard, names: Sequence[str]) -> Columns:
    """Columns of a shard by the samples' positions, for trainers whose shards are cut otherwise."""
    parts = {name: shard.split(name)[: shard.num_samples] for name in names}
    positions = shard.fields["position"].tolist()
    return {position: {name: parts[name][i] for name in names} for i, position in enumerate(positions)}


def trained_columns(shard: TrainShard, scores: np.ndarray | None) -> SampleColumns:
    """Of each sample of the shard, by its position in the rollout:

    num_trained     tokens that are trained on
    trained_reward  the reward after post-processing and normalisation
    advantage       mean over the tokens that are trained on
    mismatch        mean |trainer - engine| log-prob of those of these that the current weights sampled, nats; of the
                    trainers' log-probs before the first step: the shard's, or those that the first step's loss saw

    Unknown values, and means over no token, are left out. `scores` [2, response tokens]: as of `take_steps`.
    """
    fields, lengths, mask = shard.fields, shard.response_lengths, shard.fields["loss_mask"] > 0
    counts = _sums(mask, lengths)
    columns: dict[str, np.ndarray] = {"trained_reward": fields["rewards"].astype(np.float64)}
    if "advantages" in fields:
        columns["advantage"] = _over(_sums(np.where(mask, fields["advantages"], 0), lengths), counts)
    log_probs, used = fields.get("log_probs"), mask
    if log_probs is None and scores is not None:
        # After the first step the weights are no longer those that the rollout was made with.
        first = [i for group in shard.steps[0].micro_batches for i in group]
        log_probs, used = scores[0], mask & np.repeat(np.isin(np.arange(shard.num_samples), first), lengths)
    if log_probs is not None and "rollout_log_probs" in fields:
        with np.errstate(invalid="ignore"):  # -inf on both sides
            gaps = np.abs(log_probs.astype(np.float64) - fields["rollout_log_probs"])
        used = used & np.isfinite(gaps)
        if "current" in fields:
            used &= fields["current"] > 0
        columns["mismatch"] = _over(_sums(np.where(used, gaps, 0), lengths), _sums(used, lengths))
    rows: list[dict[str, float | int | np.ndarray]] = [{"num_trained": int(n)} for n in counts]
    for name, values in columns.items():
        for row, value in zip(rows, values.tolist(), strict=True):
            if value == value:  # not NaN
                row[name] = value
    positions = fields.get("position", np.arange(shard.num_samples))
    return dict(zip(positions.tolist(), rows, strict=True))


def add_token_values(columns: SampleColumns, shard: TrainShard, scores: np.ndarray | None) -> None:
    """Add arrays over the response tokens of each sample, NaN at tokens that are not trained on:

    log_probs   the trainers', before the first step where the shard has them, else as the loss saw them
    entropy     nats, as the loss saw it
    advantages  as the loss saw them

    scores  [2, response tokens] log-probs and entropies as the losses saw them, NaN where they saw none; None of a
            custom loss
    """
    mask = shard.fields["loss_mask"] > 0
    flat = {} if scores is None else {"log_probs": scores[0], "entropy": scores[1]}
    flat |= {name: shard.fields[name] for name in ("log_probs", "advantages") if name in shard.fields}
    ends = np.cumsum(shard.response_lengths)
    positions = shard.fields.get("position", np.arange(shard.num_samples)).tolist()
    for name, values in flat.items():
        known = np.where(mask, values, np.nan).astype(np.float32)
        if np.isnan(known).all():
            continue
        for position, start, end in zip(positions, ends - shard.response_lengths, ends, strict=True):
            columns[position][name] = known[start:end]


def _over(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """total / count, NaN where the count is 0."""
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[samples] fp64 sums of `values` [N], which stand sample after sample."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, len(lengths))
