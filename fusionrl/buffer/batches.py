"""Batch building: scored samples become what trainers get, one shard for each data-parallel rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fusionrl.buffer.border import HookBorder
from fusionrl.buffer.build import build_shards, take_shards
from fusionrl.buffer.scores import Scored
from fusionrl.config.config import Config
from fusionrl.config.hooks import call_hook, flag_of
from fusionrl.data.convert import samples_of
from fusionrl.data.pairs import best_and_worst
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.plan.plan import Plan
from fusionrl.rollout.types import check_samples

Ref = TypeVar("Ref")  # what stands for a shard: a reference into the object store


@dataclass
class TrainingSamples:
    """The samples that are trained on, in their order, with what stands beside them.

    extra        a user's columns: one value a sample
    by_groups    no optimizer step begins within a group
    has_indices  the samples are those of the rollout, or others that have their indices
    """

    samples: list[Sample]
    rewards: list[float]
    raw: list[float]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    by_groups: bool = False
    has_indices: bool = True


@dataclass
class CutShards(Generic[Ref]):
    """One shard for each rank of the actor; the same samples for each rank of the critic or process reward model."""

    shards: list[Ref] = field(default_factory=list)
    auxiliary: list[Ref] = field(default_factory=list)


def training_samples(scored: Scored, config: Config, border: HookBorder) -> TrainingSamples:
    """Choose what is trained on: all samples, what a user's conversion makes of them, or pairs for DPO."""
    path = config.reward.custom_convert_samples_to_train_data_path
    chosen = TrainingSamples(scored.samples, scored.rewards, scored.raw)
    if config.run.mode != "rl":
        return chosen
    if path is not None:
        name, args = "custom_convert_samples_to_train_data_path", border.args()
        data = call_hook(name, path, args, scored.samples)
        converted = samples_of(data, scored.samples, f"{flag_of(name)} {path}")
        check_samples(name, path, converted[0], args)
        chosen = TrainingSamples(*converted, has_indices="sample_indices" in data)
    return chosen


def pair_up(chosen: TrainingSamples, num_steps: int) -> TrainingSamples:
    """DPO: the pairs of the rollout, chosen (+1) and rejected (-1) side by side, with what belongs to them.

    Where there are fewer than optimizer steps, removed samples stand for the others: of these nothing is learnt.
    """
    pairs = best_and_worst(chosen.samples, chosen.rewards)
    members = [i for pair in pairs for i in pair]
    num_blank = max(0, num_steps - len(pairs))
    first = chosen.samples[0]
    blanks = [replace(first, remove_sample=True, group_index=-2 - i // 2) for i in range(2 * num_blank)]
    positions = members + [0] * len(blanks)
    return TrainingSamples(
        [chosen.samples[i] for i in members] + blanks,
        [1.0, -1.0] * (len(pairs) + num_blank),
        [chosen.raw[i] for i in positions],
        {name: [values[i] for i in positions] for name, values in chosen.extra.items()},
        by_groups=True,
        has_indices=chosen.has_indices,
    )


def cut(
    chosen: TrainingSamples, plan: Plan, rollout_id: int, version: int | None, put: Callable[[TrainShard], Ref]
) -> CutShards[Ref]:
    """Cut the samples into shards as the plan divides them; takes the samples out of `chosen`.

    put  puts a shard where trainers can pull it; no name holds a shard while the next one is made
    """
    assert plan.balance is not None and plan.batch is not None
    given = (chosen.samples, chosen.rewards, chosen.raw)
    named: dict[str, Any] = {"extra": chosen.extra, "by_groups": chosen.by_groups, "weight_version": version}
    auxiliary: list[Ref] = []
    if plan.auxiliary is not None:
        assert plan.auxiliary.batch is not None
        made = build_shards(*given, plan.auxiliary.batch, plan.auxiliary.balance, rollout_id=rollout_id, **named)
        auxiliary = [put(shard) for shard in made]
    taken = take_shards(*given, plan.batch, plan.balance, rollout_id=rollout_id, **named, freed=_give_memory_back)
    return CutShards(list(map(put, taken)), auxiliary)


def _give_memory_back() -> None:
    """Return what was freed to the system: glibc keeps the room of many small arrays for itself. Elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
