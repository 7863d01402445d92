"""The choice of what is trained on: all samples, what a user's conversion makes of them, or pairs for DPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.scores import Scored
from fusionrl.config.config import Config
from fusionrl.data.convert import samples_of
from fusionrl.data.sample import Sample, is_trained_on
from fusionrl.rollout.types import Limits, check_samples


@dataclass
class TrainingSamples:
    """The samples that are trained on, in their order, with their rewards and a user's columns.

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


def choose(scored: Scored, config: Config, num_steps: int, limits: Limits, border: HookBorder) -> TrainingSamples:
    """Choose what the optimizer steps of a rollout train on.

    num_steps  optimizer steps of the rollout
    limits     of numbers in the samples that a user's conversion returns

    Raises:
        HookError, ValueError: what --custom-convert-samples-to-train-data-path returned does not fit.
    """
    chosen = TrainingSamples(scored.samples, scored.rewards, scored.raw)
    if config.run.mode == "sft":
        return chosen
    if convert := border.hook("custom_convert_samples_to_train_data_path"):
        data = convert(border.args(), list(scored.samples))  # a list of its own: it may sort it
        converted = samples_of(data, scored.samples, convert.where)
        check_samples(convert.field, convert.path, converted[0], limits)
        chosen = TrainingSamples(*converted, has_indices=isinstance(data, dict) and "sample_indices" in data)
    return pair_up(chosen, num_steps) if config.algorithm.policy_loss == "dpo" else chosen


def best_and_worst(samples: Sequence[Sample], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """For each group whose rewards differ the positions of its first best and its first worst sample.

    Samples that are not trained on are in no pair.
    """
    groups: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        if is_trained_on(sample):
            groups.setdefault(sample.group_index, []).append(i)
    pairs = [
        (max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])) for members in groups.values()
    ]
    return [(best, worst) for best, worst in pairs if rewards[best] > rewards[worst]]


def pair_up(chosen: TrainingSamples, num_steps: int) -> TrainingSamples:
    """DPO: the pairs of the rollout, chosen (+1) and rejected (-1) side by side, with what belongs to them.

    If there are fewer pairs than optimizer steps, removed samples fill up the rest; they train nothing.
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
