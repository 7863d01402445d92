"""Collection: the rollout function is called until there are enough groups; what it left undone is done here."""

import asyncio
from argparse import Namespace
from collections import Counter
from contextlib import AbstractContextManager

from fusionrl.buffer.data_source import PromptSource
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of, user_code
from fusionrl.config.run_parts import DEFAULT_ROLLOUT, has_own_rollout
from fusionrl.data.sample import Sample, lacks_reward
from fusionrl.plan.plan import Plan
from fusionrl.rewards.dispatch import score_group
from fusionrl.rewards.settings import RewardSettings
from fusionrl.rollout.generate import apply_filter
from fusionrl.rollout.miles_inputs import rollout_function
from fusionrl.rollout.teacher import score_samples
from fusionrl.rollout.types import (
    Limits,
    RolloutAborted,
    RolloutFnTrainOutput,
    as_train_output,
    check_samples,
    flatten,
    take_images,
)
from fusionrl.rollout.weight_versions import fill_versions, noting_answers

DROPPED = "rollout/dropped_"  # metrics of this prefix count groups; they add up over calls
SFT_ROLLOUT = "fusionrl.rollout.sft_rollout.generate_rollout"
MAX_REFILLS = 10  # calls of a rollout function that keeps returning too few groups


class RolloutFunctions:
    """Calls --rollout-function-path and --eval-function-path with `args` and the data source."""

    def __init__(self, config: Config, source: PromptSource) -> None:
        rollout = config.rollout
        self._source = source
        is_sft = config.run.mode == "sft" and not has_own_rollout(config)
        self._path = rollout.rollout_function_path
        self._function = rollout_function(SFT_ROLLOUT if is_sft else self._path)
        self._eval_field = "eval_function_path" if rollout.eval_function_path else "rollout_function_path"
        self._eval_path = rollout.eval_function_path or self._path
        self._eval_function = rollout_function(self._eval_path)

    @property
    def where(self) -> str | None:
        """Flag and path of a user's own rollout function; None for the default one."""
        return None if self._path == DEFAULT_ROLLOUT else f"--rollout-function-path {self._path}"

    @property
    def keeps_groups(self) -> bool | None:
        """Return whether the rollout function says that it keeps groups between its calls; None: it does not say."""
        return getattr(self._function, "keeps_groups", None)

    def generate(self, args: Namespace, rollout_id: int, data_source: object | None = None) -> object:
        """Call the rollout function; returns what it returned. `data_source`: what stands before the run's own."""
        source = self._source.hooked if data_source is None else data_source
        with self._named("rollout_function_path", self._path):
            return self._function(args, rollout_id, source)

    def evaluate(self, args: Namespace, rollout_id: int) -> object:
        with self._named(self._eval_field, self._eval_path):
            return self._eval_function(args, rollout_id, self._source.hooked, evaluation=True)

    def _named(self, field: str, path: str) -> AbstractContextManager[None]:
        """Return a block in which an error of the user's names its flag and function."""
        if path == DEFAULT_ROLLOUT:  # of the user's functions in it, only the data source does not name itself
            return self._source.guarded()
        return user_code(f"{flag_of(field)} {path}", path, passing=(RolloutAborted,))


class Collector:
    """Collects --rollout-batch-size groups: generated, scored, filtered and numbered."""

    def __init__(
        self, config: Config, plan: Plan, border: HookBorder, functions: RolloutFunctions, source: PromptSource
    ) -> None:
        self._config, self._plan = config, plan
        self._border, self._functions, self._source = border, functions, source

    def collect(self, rollout_id: int) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of one rollout, group after group, chosen and checked, and the function's own metrics."""
        groups, refused, metrics = self._enough_groups(rollout_id)
        samples = self._choose(groups, refused)
        asyncio.run(score_samples(self._border.teacher, samples))  # those of a user's rollout function
        return samples, metrics

    def call(self, rollout_id: int, data_source: object) -> RolloutFnTrainOutput:
        """Call the rollout function once, with `data_source`. Returns its groups, scored and filtered; `metrics` and
        `refused` also have what was filtered here.
        """
        args = self._border.args()
        output = self._call(args, rollout_id, data_source)
        dropped: Counter[str] = Counter()
        groups = self._finish(args, output, dropped)
        asyncio.run(score_samples(self._border.teacher, flatten(groups)))
        for name, count in dropped.items():
            output.metrics[name] = output.metrics.get(name, 0.0) + count
        return RolloutFnTrainOutput(groups, output.metrics, output.refused)

    def finish(self, groups: list[list[Sample]], refused: list[list[Sample]]) -> list[Sample]:
        """Return the samples of groups of a stream, which were generated, scored and filtered: chosen and checked.

        refused  groups that only the hook sees that sees all
        """
        if show_all := self._border.hook("rollout_all_samples_process_path"):
            show_all(self._border.args(), [*groups, *refused], _no_prompts)
        return self._cut(groups)

    def _enough_groups(self, rollout_id: int) -> tuple[list[list[Sample]], list[list[Sample]], dict[str, float]]:
        """Call the rollout function until there are enough groups; score and filter what it left undone.

        Returns the groups that are kept, those that are refused, and metrics.
        """
        assert self._plan.batch is not None
        num_wanted = self._plan.batch.num_prompts
        groups: list[list[Sample]] = []
        refused: list[list[Sample]] = []
        metrics: dict[str, float] = {}
        dropped: Counter[str] = Counter()
        for _ in range(MAX_REFILLS):
            args = self._border.args()  # one for the rollout function and for what it left undone
            output = self._call(args, rollout_id)
            dropped.update({k: v for k, v in output.metrics.items() if k.startswith(DROPPED)})
            metrics.update(output.metrics)
            groups += output.samples if self._config.run.mode == "sft" else self._finish(args, output, dropped)
            refused += output.refused
            if len(groups) >= num_wanted:
                break
        if len(groups) < num_wanted:
            raise ValueError(
                f"--rollout-function-path {self._config.rollout.rollout_function_path}: {MAX_REFILLS} calls gave"
                f" {len(groups)} groups that pass the filter, --rollout-batch-size is {num_wanted}"
            )
        if len(groups) > num_wanted:
            dropped[f"{DROPPED}surplus"] += len(groups) - num_wanted
        return groups, refused, {**metrics, **dropped}

    def _call(self, args: Namespace, rollout_id: int, data_source: object | None = None) -> RolloutFnTrainOutput:
        """Call the rollout function once; tokens of a user's function get the weight versions that engines said."""
        with noting_answers(self._border.policy_urls(), keeps_tokens=False) as answers:
            output = as_train_output(self._functions.generate(args, rollout_id, data_source))
        if self._functions.where is not None:
            samples = flatten(output.samples)
            if answers.urls:
                fill_versions(samples, answers, self._functions.where)
            take_images(self._functions.where, samples)
        return output

    def _finish(self, args: Namespace, output: RolloutFnTrainOutput, dropped: Counter[str]) -> list[list[Sample]]:
        """Compute rewards that are still missing; groups that got them here are filtered here."""
        complete: list[list[Sample]] = []
        settings = RewardSettings.of_args(args)
        for group in output.samples:
            missing = [s for s in group if s.reward is None and not lacks_reward(s)]
            if missing:
                rewards = asyncio.run(score_group(settings, missing))
                for sample, reward in zip(missing, rewards, strict=True):
                    sample.reward = reward
                verdict = apply_filter(self._config.rollout.dynamic_sampling_filter_path, args, group)
                if not verdict.keep:
                    dropped[f"{DROPPED}{verdict.reason or 'filtered'}"] += 1
                    output.refused.append(group)
                    continue
            complete.append(group)
        return complete

    def _choose(self, groups: list[list[Sample]], refused: list[list[Sample]]) -> list[Sample]:
        """Cut the groups to the batch, after the hook that sees all finished ones in the order of their samples."""
        if show_all := self._border.hook("rollout_all_samples_process_path"):
            finished = sorted([*groups, *refused], key=lambda group: group[0].index or 0) if refused else groups
            show_all(self._border.args(), finished, self._source.hooked.get_samples)
        return self._cut(groups)

    def _cut(self, groups: list[list[Sample]]) -> list[Sample]:
        """Cut the groups to the batch, before the hook that filters; number and check them."""
        assert self._plan.batch is not None
        path = self._config.rollout.rollout_function_path
        groups = groups[: self._plan.batch.num_prompts]
        if mark_removed := self._border.hook("rollout_sample_filter_path"):
            mark_removed(self._border.args(), groups)
        for position, group in enumerate(groups):
            _number_group(group, position)
            check_samples("rollout_function_path", path, group, limits_of(self._plan), are_new=False)
        return flatten(groups)


def _no_prompts(num_samples: int) -> list[list[Sample]]:
    raise RuntimeError(
        f"get_samples({num_samples}): under a pipeline that runs ahead the stream alone draws prompts, or some would"
        " never be trained; take --pipeline on-policy"
    )


def limits_of(plan: Plan) -> Limits:
    """Return the limits of the plan's model, against which numbers in samples are checked."""
    return Limits(plan.shape.vocab_size, plan.shape.num_experts or None)


def _number_group(group: list[Sample], position: int) -> None:
    """Samples that a rollout function made without a group get their group's number, or one below zero."""
    known = (sample.group_index for sample in group if sample.group_index is not None)
    number = next(known, -2 - position)
    for sample in group:
        if sample.group_index is None:
            sample.group_index = number
