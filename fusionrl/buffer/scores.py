"""The reward stage: from each sample's reward to the number that is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusionrl.algorithms.groups import SampleBatch
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.attempts import attempts_of
from fusionrl.data.convert import check_rewards
from fusionrl.data.sample import Sample, is_trained_on, lacks_reward, reward_value, trained_amount
from fusionrl.rewards.length import length_reward


@dataclass
class Scored:
    """The samples of a rollout with their rewards.

    raw      [n] as the reward function gave them; 0 for a sample without one
    rewards  [n] what is trained on: with penalties for length, normalised over each group where the estimator says so
    """

    samples: list[Sample]
    raw: list[float]
    rewards: list[float]


def score(samples: list[Sample], config: Config, border: HookBorder) -> Scored:
    """Return the rewards of a rollout's samples; those of --mode sft are 0.

    Raises:
        HookError, ValueError: a reward is not a number, the estimator cannot take it, or a user's function failed.
    """
    if config.run.mode == "sft":
        zeros = [0.0] * len(samples)
        return Scored(samples, zeros, zeros)
    post_process = border.hook("custom_reward_post_process_path")
    if post_process is None:
        raw = [0.0 if lacks_reward(sample) else _value(sample, config.reward.reward_key) for sample in samples]
        return Scored(samples, raw, group_advantages(samples, _shaped(samples, raw, config), config))
    return _post_processed(samples, post_process(border.args(), samples), post_process.where)


def _post_processed(samples: list[Sample], output: object, where: str) -> Scored:
    """Return the rewards as the function of --custom-reward-post-process-path returned them: (raw, rewards).

    Raises:
        HookError, ValueError: it returned something other than two lists of one number a sample; names `where`.
    """
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise HookError(f"{where}: it returned {type(output).__name__}; a tuple (raw rewards, rewards) is wanted")
    raw, rewards = output
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise ValueError(f"{where}: it returned {len(raw)} raw and {len(rewards)} rewards for {len(samples)} samples")
    raw, rewards = [float(r) for r in raw], [float(r) for r in rewards]
    check_rewards(raw, rewards, where)
    return Scored(samples, raw, rewards)


def _shaped(samples: Sequence[Sample], raw: Sequence[float], config: Config) -> list[float]:
    """Add the penalties for length."""
    longest = config.rollout.rollout_max_response_len
    return [r + length_reward(s.response_length, longest, config.reward) for s, r in zip(samples, raw, strict=True)]


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
