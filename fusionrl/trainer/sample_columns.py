"""Values of single samples that training found out: cheap sums over each sample's tokens, for people to look at."""

from __future__ import annotations

import numpy as np

from fusionrl.data.train_batch import TrainShard
from fusionrl.trainer.shared_columns import SampleColumns


def sample_columns(shard: TrainShard, differences: np.ndarray | None) -> SampleColumns:
    """Of each sample of the shard, by its position in the rollout:

    num_trained     tokens that are trained on
    trained_reward  the reward after post-processing and normalisation
    advantage       mean over the tokens that are trained on
    mismatch        mean |trainer - engine| log-prob of those of these that the current weights sampled, nats; of the
                    trainers' log-probs before the first step where the shard has them, else `differences` [num_samples]

    Unknown values, and means over no token, are left out.
    """
    lengths, mask = shard.response_lengths, shard.fields["loss_mask"] > 0
    counts = _sums(mask, lengths)
    columns: dict[str, np.ndarray] = {"trained_reward": shard.fields["rewards"].astype(np.float64)}
    if "advantages" in shard.fields:
        columns["advantage"] = _over(_sums(np.where(mask, shard.fields["advantages"], 0), lengths), counts)
    if "log_probs" in shard.fields and "rollout_log_probs" in shard.fields:
        with np.errstate(invalid="ignore"):  # -inf on both sides
            gaps = np.abs(shard.fields["log_probs"] - shard.fields["rollout_log_probs"])
        used = mask & np.isfinite(gaps)
        if "current" in shard.fields:
            used &= shard.fields["current"] > 0
        num_used = counts if used.sum() == mask.sum() else _sums(used, lengths)
        columns["mismatch"] = _over(_sums(np.where(used, gaps, 0), lengths), num_used)
    elif differences is not None:
        columns["mismatch"] = differences
    rows: list[dict[str, float | int | np.ndarray]] = [{"num_trained": int(n)} for n in counts]
    for name, values in columns.items():
        for row, value in zip(rows, values.tolist(), strict=True):
            if value == value:  # not NaN
                row[name] = value
    positions = shard.fields.get("position", np.arange(shard.num_samples))
    return dict(zip(positions.tolist(), rows, strict=True))


def add_token_values(columns: SampleColumns, shard: TrainShard, scores: np.ndarray) -> None:
    """Add arrays over the response tokens of each sample, NaN at tokens that are not trained on:

    log_probs   the trainers', before the first step where the shard has them, else as the loss saw them
    entropy     nats, as the loss saw it
    advantages  as the loss saw them

    scores  [2, response tokens] log-probs and entropies as the losses saw them, NaN where they saw none
    """
    mask = shard.fields["loss_mask"] > 0
    flat = {"log_probs": shard.fields.get("log_probs", scores[0]), "entropy": scores[1]}
    if "advantages" in shard.fields:
        flat["advantages"] = shard.fields["advantages"]
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
    sums = np.zeros(len(lengths))
    filled = np.flatnonzero(lengths)  # an empty stretch has no sum of its own to reduceat
    if filled.size:
        starts = np.cumsum(lengths) - lengths
        sums[filled] = np.add.reduceat(values, starts[filled], dtype=np.int64 if values.dtype == bool else np.float64)
    return sums
