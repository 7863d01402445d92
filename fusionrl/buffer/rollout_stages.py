"""One rollout, stage after stage: collect or replay → rewards → report → write → accept → choose → cut.

Each stage is a function of the stage before it, in a file of its own; users' functions are called at the borders
between them. The collection is the only stage that waits for engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.algorithms.stages import SampleBatch
from fusionrl.buffer.collect import Collector, HookBorder, limits_of
from fusionrl.buffer.rollout_report import best_and_worst, report, training_version
from fusionrl.buffer.sample_files import SampleFiles, TrainedSamples, load_samples, save_samples
from fusionrl.buffer.train_shards import StepStaleness, TrainingSamples, cut
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.config.pipeline import corrects_by_default
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.columns import check_adapter
from fusionrl.data.sample import Sample, is_trained_on, lacks_reward, reward_value, trained_amount
from fusionrl.data.sample_json import check_rewards, samples_of
from fusionrl.data.train_batch import TrainShard, attempts_of
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.spans import phase, span
from fusionrl.plan.costs import Work
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapter_folders
from fusionrl.rewards.dispatch import length_reward, mean_metrics
from fusionrl.rollout.types import Limits, check_samples
from fusionrl.rollout.weight_versions import warn_once

if TYPE_CHECKING:
    from fusionrl.buffer.cursor import Cursor
    from fusionrl.buffer.reject_sampling import AcceptedSamples
    from fusionrl.buffer.stream import Batch


@dataclass
class Rollout:
    """A rollout as the driver gets it: references to one shard a rank, and numbers."""

    rollout_id: int
    shards: list[Any]  # object references, from which the trainers pull their shards; of several adapters, one by one
    metrics: dict[str, float] = field(default_factory=dict)
    num_accepted: int = 0
    auxiliary_shards: list[Any] = field(default_factory=list)  # the same samples, cut for the critic's or prm's ranks
    warnings: list[str] = field(default_factory=list, kw_only=True)  # for the console
    facts: RolloutFacts | None = field(default=None, kw_only=True)  # for warnings; not in --mode sft
    glimpses: list[Glimpse] = field(default_factory=list, kw_only=True)  # --log-samples of its samples
    work: Work = field(default_factory=Work, kw_only=True)  # of the samples that are trained on
    cursor: Cursor | None = field(default=None, kw_only=True)  # None: no other Buffer can continue


class RolloutStages:
    """The stages of a rollout, and the files that they write."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        border: HookBorder,
        collector: Collector,
        writer: RolloutWriter,
        accepted: AcceptedSamples | None,
        attempt: int,
        put: Callable[[TrainShard], object],
    ) -> None:
        self._config, self._plan, self._border, self._collector = config, plan, border, collector
        self._accepted, self._put, self._adapters = accepted, put, tuple(adapter_folders(config))
        self._files = SampleFiles(config, writer, attempt)
        self.trained = TrainedSamples(writer)

    def make(self, rollout_id: int, pushed_version: int | None, since: float) -> Rollout:
        """Make rollout `rollout_id`, which began at `since` (`time.monotonic`): collected, or read from a file."""
        if path := self._config.run.load_debug_rollout_data:
            pushed_version = None  # the versions in the file are those of another run
            return self._pass_on(rollout_id, load_samples(path, rollout_id, self._plan), {}, pushed_version, since)
        with phase("collect", lane="stages", step=rollout_id + 1):
            samples, metrics = self._collector.collect(rollout_id)
        return self._pass_on(rollout_id, samples, metrics, pushed_version, since)

    def make_of(self, rollout_id: int, batch: Batch, since: float) -> Rollout:
        """Make rollout `rollout_id` of what the stream gave."""
        samples = self._collector.choose(batch.groups, batch.refused, is_stream=True)
        warn_without_log_probs(samples, self._config)
        return self._pass_on(rollout_id, samples, batch.metrics, batch.version, since, trains=rollout_id)

    def _pass_on(
        self,
        rollout_id: int,
        samples: list[Sample],
        metrics: dict[str, float],
        pushed_version: int | None,
        since: float,
        trains: int | None = None,
    ) -> Rollout:
        """Take the samples through the stages behind the collection.

        trains  version of the trainers' weights where they are ahead of the engines': they train several rollouts
                between two pushes, and log-probs of older weights are not compared with theirs
        """
        config, border, mode = self._config, self._border, self._config.run.mode
        if config.run.save_debug_rollout_data:
            save_samples(config.run.save_debug_rollout_data, rollout_id, samples)
        num_accepted, shards, auxiliary, work = 0, list[Any](), list[Any](), Work()
        with span("rewards and report", lane="stages"):
            divided = by_adapter(samples, self._adapters)
            parts = {name: training_rewards(members, config, border) for name, members in divided.items()}
            scored = pooled(list(parts.values()))
            metrics, facts, glimpses = report(rollout_id, scored, metrics, pushed_version, since, config, border)
            if len(self._adapters) > 1:
                for name, part in parts.items():
                    metrics |= mean_metrics(f"adapter/{name}", part.samples, part.raw)
        with span("write", lane="stages"):
            path = self._files.write(rollout_id, scored.samples)
        if self._accepted is not None:
            counts = self._accepted.add(rollout_id, scored.samples, scored.raw)
            num_accepted = counts["accepted"]
            metrics |= {f"rollout/{name}": float(count) for name, count in counts.items()}
        elif self._plan.balance is not None and self._plan.batch is not None and mode != "eval":
            num_steps, limits = self._plan.batch.num_steps, limits_of(self._plan)
            chosen = {name: choose(part, config, num_steps, limits, border) for name, part in parts.items()}
            trained = pooled(list(chosen.values()))
            if path is not None and mode == "rl":
                has_indices = all(part.has_indices for part in chosen.values())
                self.trained.gave(rollout_id, path, scored.samples, trained.samples, has_indices)
            images = {image.key: image.num_tokens for sample in trained.samples for _, image in sample.image_spans}
            work = Work.of((sample.num_tokens for sample in trained.samples), images.values())
            versions = {name: training_version(part.samples, pushed_version) for name, part in parts.items()}
            # `cut` takes the samples out of the last lists that hold them; some of these may be the same list.
            cut_lists = {id(part.samples) for part in chosen.values()}
            for held in (samples, scored.samples, trained.samples, *(part.samples for part in parts.values())):
                if id(held) not in cut_lists:
                    held.clear()
            # Without a push the versions belong to another run, whose steps are unknown.
            newest = pushed_version if trains is None else trains
            ages = None if newest is None else StepStaleness.of(newest, config)
            temperature, first = config.rollout.rollout_temperature, 0
            for name, part in chosen.items():
                version, count = versions[name] if trains is None else trains, len(part.samples)
                with phase("cut", lane="stages", step=rollout_id + 1):
                    refs = cut(part, self._plan, rollout_id, version, self._put, ages, temperature, name, first)
                shards, auxiliary, first = shards + refs[0], auxiliary + refs[1], first + count
            metrics |= {} if ages is None else ages.metrics()
        return Rollout(rollout_id, shards, metrics, num_accepted, auxiliary, facts=facts, glimpses=glimpses, work=work)


def warn_without_log_probs(samples: Sequence[Sample], config: Config) -> None:
    """Warn once if --use-tis is on by default, not by the user, and a function sets no rollout_log_probs.

    Such rollouts are trained uncorrected. Where the flag was given, they are an error of the loss.
    """
    if not corrects_by_default(config):
        return
    lacking = next((s for s in samples if is_trained_on(s) and vars(s)["rollout_log_probs"] is None), None)
    if lacking is not None:
        warn_once(
            "rollout_log_probs of --use-tis",
            f"sample {lacking.index} has no rollout_log_probs, so --use-tis, the default of --pipeline"
            f" {config.run.pipeline}, does nothing in such rollouts: tokens of older weights are taken for tokens of"
            " the newest. Let your function set them (docs/guides/agents.md), or give --no-use-tis",
        )


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
    """Return the samples of several adapters one after the other, as they came from `training_rewards`."""
    if len(parts) == 1:
        return parts[0]
    samples = [sample for part in parts for sample in part.samples]
    return TrainingSamples(
        samples, [r for part in parts for r in part.rewards], [r for part in parts for r in part.raw]
    )


def training_rewards(samples: list[Sample], config: Config, border: HookBorder) -> TrainingSamples:
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
