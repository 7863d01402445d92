"""Samples → train shards: one balanced shard per data-parallel rank.

Every rank gets, in each optimizer step, the same number of micro-batches; the counts over which a loss is averaged
are those of the whole step, so that no split changes the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusionrl.data.sample import Sample, Status
from fusionrl.data.train_batch import FIELDS, TrainShard, TrainStep, flat_field
from fusionrl.plan.balance import Balance, divide
from fusionrl.plan.batch import BatchPlan

OPTIONAL = tuple(name for name, spec in FIELDS.items() if not (spec.required or spec.is_derived))


def build_shards(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    raw_rewards: Sequence[float],
    plan: BatchPlan,
    balance: Balance,
    *,
    rollout_id: int,
    extra: dict[str, list[Any]] | None = None,
) -> list[TrainShard]:
    """Cut a rollout into `plan.num_steps` optimizer steps and each step over `plan.dp_size` ranks.

    samples  in the order in which they are trained; siblings of one group stand side by side and stay in one step
             where the step's size allows it.
    extra    a user's columns: one value a sample.

    Raises:
        ValueError: fewer groups than optimizer steps, a sample whose lengths do not agree, or one that is longer than a
            micro-batch may be.
    """
    bounds = _step_bounds(samples, plan)
    for sample in samples:
        sample.validate()
    per_rank: list[list[int]] = [[] for _ in range(plan.dp_size)]
    steps: list[list[TrainStep]] = [[] for _ in range(plan.dp_size)]
    for first, end in itertools.pairwise(bounds):
        chosen = samples[first:end]
        masks = [response_mask(sample) for sample in chosen]
        num_tokens = int(sum(mask.sum() for mask in masks))
        num_samples = int(sum(mask.any() for mask in masks))
        for rank, bins in enumerate(_divide(chosen, plan.dp_size, balance)):
            members = sorted(i for b in bins for i in b)
            local = {position: len(per_rank[rank]) + i for i, position in enumerate(members)}
            steps[rank].append(TrainStep([[local[i] for i in b] for b in bins], num_tokens, num_samples))
            per_rank[rank] += [first + i for i in members]
    present = [name for name in OPTIONAL if all(_has(sample, name) for sample in samples)]
    return [
        _shard(
            [samples[i] for i in members],
            [rewards[i] for i in members],
            [raw_rewards[i] for i in members],
            present,
            rollout_id=rollout_id,
            steps=s,
            positions=members,
            extra={name: [values[i] for i in members] for name, values in (extra or {}).items()},
        )
        for members, s in zip(per_rank, steps, strict=True)
    ]


def _step_bounds(samples: Sequence[Sample], plan: BatchPlan) -> list[int]:
    """Where each optimizer step begins, and where the last one ends.

    A user's functions may make several samples for one prompt, or fewer prompts; then steps are of as many groups.
    """
    if len(samples) == plan.num_samples:
        return [step * plan.global_batch_size for step in range(plan.num_steps + 1)]
    groups = _siblings(samples)
    if len(groups) < plan.num_steps:
        raise ValueError(
            f"the rollout has {len(groups)} groups of samples for {plan.num_steps} optimizer steps "
            "(--num-steps-per-rollout); return more groups, or lower it"
        )
    starts = [group[0] for group in groups] + [len(samples)]
    return [starts[step * len(groups) // plan.num_steps] for step in range(plan.num_steps)] + [len(samples)]


def _divide(chosen: Sequence[Sample], dp_size: int, balance: Balance) -> list[list[list[int]]]:
    """rank → micro-batch → positions in `chosen`."""
    lengths = np.array([len(sample.tokens) for sample in chosen])
    prompts = lengths - np.array([sample.response_length for sample in chosen])
    padded = balance.padded(lengths)
    if int(padded.max(initial=0)) > balance.max_tokens:
        longest = int(padded.argmax())
        raise ValueError(
            f"sample {chosen[longest].index} has {lengths[longest]} tokens ({padded[longest]} with padding), over the "
            f"{balance.max_tokens} of a micro-batch (--max-tokens-per-gpu x --context-parallel-size); raise "
            "--max-tokens-per-gpu, or bound the length with --rollout-max-context-len"
        )
    return divide(lengths, prompts, _siblings(chosen), dp_size, balance)


def _siblings(chosen: Sequence[Sample]) -> list[list[int]]:
    """Positions in `chosen`, group by group: samples of one group that stand side by side."""
    groups: list[list[int]] = []
    for position, sample in enumerate(chosen):
        group = sample.group_index
        if groups and group is not None and group == chosen[groups[-1][-1]].group_index:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def _has(sample: Sample, name: str) -> bool:
    """Whether the sample has the field; one that trains nothing does not need it."""
    return getattr(sample, name, None) is not None or not response_mask(sample).any()


def response_mask(sample: Sample) -> np.ndarray:
    """[response_length] float32: 1 where the token is trained on; all 0 for a removed or failed sample."""
    if sample.remove_sample or sample.status in (Status.FAILED, Status.ABORTED):
        return np.zeros(sample.response_length, np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, np.float32)
    return np.asarray(sample.loss_mask, np.float32)


def _shard(
    samples: list[Sample],
    rewards: list[float],
    raw_rewards: list[float],
    present: list[str],
    *,
    rollout_id: int,
    steps: list[TrainStep],
    positions: list[int],
    extra: dict[str, list[Any]],
) -> TrainShard:
    """One rank's shard. `present` is decided over all ranks: a field stands in every shard or in none."""
    fields: dict[str, np.ndarray] = {
        "tokens": flat_field("tokens", [s.tokens for s in samples]),
        "loss_mask": flat_field("loss_mask", [response_mask(s) for s in samples]),
        "rewards": flat_field("rewards", rewards),
        "raw_rewards": flat_field("raw_rewards", raw_rewards),
        "sample_index": flat_field("sample_index", [_or(s.index, -1) for s in samples]),
        "group_index": flat_field("group_index", [_or(s.group_index, -1) for s in samples]),
        "position": flat_field("position", positions),
        "truncated": flat_field("truncated", [s.status == Status.TRUNCATED for s in samples]),
    }
    for name in present:
        values: list[Any] = [getattr(s, name, None) for s in samples]
        blank = [np.zeros(s.response_length) if v is None else v for s, v in zip(samples, values, strict=True)]
        fields[name] = flat_field(name, blank)
    return TrainShard(
        rollout_id=rollout_id,
        total_lengths=np.array([len(s.tokens) for s in samples], np.int32),
        response_lengths=np.array([s.response_length for s in samples], np.int32),
        fields=fields,
        steps=steps,
        metadata=[s.train_metadata if s.train_metadata is not None else s.metadata for s in samples],
        extra=extra,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
