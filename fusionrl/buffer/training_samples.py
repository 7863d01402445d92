"""The samples that are trained on: their rewards, and the choice of all, converted ones, or pairs for DPO."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fusionrl.algorithms.stages import SampleBatch
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.adapter_column import check_adapter
from fusionrl.data.attempts import attempts_of
from fusionrl.data.convert import check_rewards, samples_of
from fusionrl.data.sample import Sample, is_trained_on, lacks_reward, reward_value, trained_amount
from fusionrl.rewards.length import length_reward
from fusionrl.rollout.types import Limits, check_samples


@dataclass
class TrainingSamples:
    """Samples in the order in which they are trained on, with their rewards and a user's columns.

    rewards      [n] what is trained on: with penalties for length, normalised over each group where the estimator says
                 so
    raw          [n] as the reward function gave them; 0 for a sample without one
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


def by_adapter(samples: list[Sample], names: Sequence[str]) -> dict[str | None, list[Sample]]:
    """Divide a rollout's samples by the adapter that learns from them; {None: samples} with fewer than two `names`.

    Raises:
        ValueError: a sample names none of them.
    """
    if len(names) < 2:
        return {None: samples}
    for sample in samples:
        check_adapter(sample, names)
    parts = {name: [sample for sample in samples if sample.adapter == name] for name in names}
    return {name: members for name, members in parts.items() if members}


def pooled(parts: Sequence[TrainingSamples]) -> TrainingSamples:
    """Return the samples of several adapters one after the other, as they came from `score`."""
    if len(parts) == 1:
        return parts[0]
    samples = [sample for part in parts for sample in part.samples]
    return TrainingSamples(
        samples, [r for part in parts for r in part.rewards], [r for part in parts for r in part.raw]
    )


def score(samples: list[Sample], config: Config, border: HookBorder) -> TrainingSamples:
    """Return the rewards of a rollout's samples; those of --mode sft are 0. HookError, ValueError: it has none."""
    if config.run.mode == "sft":
        zeros = [0.0] * len(samples)
        return TrainingSamples(samples, zeros, zeros)
    post_process = border.hook("custom_reward_post_process_path")
    if post_process is None:
        raw = [0.0 if lacks_reward(sample) else _value(sample, config.reward.reward_key) for sample in samples]
        longest = config.rollout.rollout_max_response_len
        lengths = [length_reward(sample.response_length, longest, config.reward) for sample in samples]
        shaped = [reward + penalty for reward, penalty in zip(raw, lengths, strict=True)]
        return TrainingSamples(samples, group_advantages(samples, shaped, config), raw)
    return _post_processed(samples, post_process(border.args(), samples), post_process.where)


def _post_processed(samples: list[Sample], output: object, where: str) -> TrainingSamples:
    """Return the rewards as the function of --custom-reward-post-process-path returned them: (raw, rewards)."""
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise HookError(f"{where}: it returned {type(output).__name__}; a tuple (raw rewards, rewards) is wanted")
    raw, rewards = output
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise ValueError(f"{where}: it returned {len(raw)} raw and {len(rewards)} rewards for {len(samples)} samples")
    raw, rewards = [float(r) for r in raw], [float(r) for r in rewards]
    check_rewards(raw, rewards, where)
    return TrainingSamples(samples, rewards, raw)


def _value(sample: Sample, key: str | None) -> float:
    try:
        return reward_value(sample.reward, key, "--reward-key")
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from error


def group_advantages(samples: Sequence[Sample], rewards: list[float], config: Config) -> list[float]:
    """Compare each sample's reward with its siblings'; untouched where the trainers' estimator does it."""
    algorithm = config.algorithm
    estimator = estimator_of(algorithm)
    stage = estimator.group_stage(is_plain=algorithm.disable_grpo_std_normalization)
    is_left = algorithm.disable_rewards_normalization or algorithm.policy_loss == "dpo"
    if is_left or stage is None or config.run.mode != "rl":
        return rewards
    groups = [s.group_index if s.group_index is not None else -1 - i for i, s in enumerate(samples)]
    batch = SampleBatch(
        np.asarray(rewards, np.float64),
        np.array(groups),
        lengths=np.array([trained_amount(sample) for sample in samples]),
        baselines=_baselines(samples, algorithm.advantage_estimator) if estimator.needs_greedy_answer else None,
        k=algorithm.pass_k,
        scored=np.array([not lacks_reward(sample) for sample in samples], bool),
        attempts=attempts_of(samples),
    )
    return stage(batch).tolist()


def _baselines(samples: Sequence[Sample], estimator: str) -> np.ndarray:
    """[n] reward of the greedy answer to each sample's prompt, shaped as rewards are; 0 where it counts for nothing."""
    missing = [sample.index for sample in samples if sample.baseline_reward is None and is_trained_on(sample)]
    if missing:
        raise ValueError(
            f"--advantage-estimator {estimator}: sample {missing[0]} has no baseline_reward, that of a greedy answer"
            " to its prompt; the default rollout sets it, a function of --rollout-function-path has to"
        )
    return np.array([sample.baseline_reward or 0.0 for sample in samples], np.float64)


def choose(
    scored: TrainingSamples, config: Config, num_steps: int, limits: Limits, border: HookBorder
) -> TrainingSamples:
    """Choose what the `num_steps` optimizer steps of a rollout train on.

    limits  of numbers in the samples that --custom-convert-samples-to-train-data-path returns
    """
    if config.run.mode == "sft":
        return scored
    chosen = scored
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
