"""Collection: the rollout function is called until there are enough groups; what it left undone is done here.

`HookBorder` makes the flat `args` that users' functions get, as slime's users know them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fusionrl.base.environment import ROUTER_KEY
from fusionrl.buffer.data_source import PromptSource
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.config.hooks import call_hook, flag_of, load_function, user_code
from fusionrl.config.run_parts import DEFAULT_ROLLOUT, has_own_rollout
from fusionrl.data.sample import Sample, lacks_reward
from fusionrl.engines.http import ROUTER_URLS
from fusionrl.plan.plan import Plan
from fusionrl.rewards.dispatch import RewardSettings, score_group
from fusionrl.rollout.sglang_rollout import apply_filter
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


@dataclass(frozen=True)
class EngineEndpoints:
    """Addresses of the engines; empty in a mode without engines, `eval_…` without --eval-num-gpus."""

    router_url: str = ""
    engine_urls: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    rm_urls: tuple[str, ...] = ()
    teacher_urls: tuple[str, ...] = ()
    eval_router_url: str = ""
    eval_urls: tuple[str, ...] = ()

    def export(self) -> None:
        """Put the key, and the addresses that get it, into this process's environment: for requests of hooks."""
        if self.api_key is not None:
            os.environ[ROUTER_KEY] = self.api_key
            urls = [self.router_url, *self.engine_urls, *self.rm_urls, *self.teacher_urls]
            urls += [self.eval_router_url, *self.eval_urls]
            os.environ[ROUTER_URLS] = " ".join(urls)


@dataclass(frozen=True)
class Hook:
    """A user's function of one flag. What it raises names the flag and the function."""

    field: str
    path: str

    @property
    def where(self) -> str:
        """Flag and function, as messages begin."""
        return f"{flag_of(self.field)} {self.path}"

    def __call__(self, *arguments: object) -> object:
        """Call the function; HookError for whatever it raises."""
        return call_hook(self.field, self.path, *arguments)


class HookBorder:
    """Makes the `args` of hooks; nothing else in the Buffer reads flags from a flat namespace.

    They are built once for the same endpoints. Each hook gets a copy of its own, so that what one writes on it reaches
    no other.
    """

    def __init__(self, config: Config, plan: Plan, run_dir: Path, abort: threading.Event) -> None:
        self._config, self._plan, self._run_dir, self._abort = config, plan, run_dir, abort
        self.endpoints = EngineEndpoints()
        self.pushed_version: int | None = None
        """Of the weights that the policy's engines have at least; None: not known."""
        self._built = functools.lru_cache(maxsize=2)(self._build)  # of rollouts, and of evaluations

    def hook(self, field: str) -> Hook | None:
        """Return the function of the flag of `field`; None where the user gives none."""
        flags = {**vars(self._config.rollout), **vars(self._config.reward)}
        return Hook(field, flags[field]) if flags[field] is not None else None

    def args(self, is_evaluation: bool = False) -> Namespace:
        """Return a copy of the flags for one call of a hook, with slime's names for what the run adds.

        An evaluation may have engines of its own.
        """
        ends, version = self.endpoints, self.pushed_version
        if is_evaluation and ends.eval_urls:
            ends, version = replace(ends, router_url=ends.eval_router_url, engine_urls=ends.eval_urls), None
        args = copy.deepcopy(self._built(ends))
        args.pushed_version = version
        return args

    def policy_urls(self) -> list[str]:
        """Return the addresses of the policy's engines and of their router."""
        return [url for url in (self.endpoints.router_url, *self.endpoints.engine_urls) if url]

    def _build(self, ends: EngineEndpoints) -> Namespace:
        shape = self._plan.shape
        host, _, port = ends.router_url.removeprefix("http://").rpartition(":")
        asks_for_experts = self._config.algorithm.use_rollout_routing_replay and self._plan.device == "cuda"
        added: dict[str, object] = dict(  # noqa: C408  # names of `args`, as a hook writes them
            sglang_router_ip=host or None,
            sglang_router_port=int(port) if port else None,
            router_url=ends.router_url,
            engine_urls=list(ends.engine_urls),
            api_key=ends.api_key,
            rm_urls=list(ends.rm_urls),
            teacher_urls=list(ends.teacher_urls),
            rollout_global_dataset=self._config.data.prompt_data is not None,
            rollout_num_engines=len(ends.engine_urls),
            vocab_size=shape.vocab_size,
            # (layers, experts of a token), where the engines are asked which experts they chose
            routed_experts_size=(shape.num_layers, shape.mixture.topk) if asks_for_experts and shape.mixture else None,
            num_experts=shape.num_experts or None,
            save=str(self._run_dir / "checkpoints"),
            load=None,
            run_dir=str(self._run_dir),
            abort_event=self._abort,
        )
        args = self._config.to_args(**self._plan.answers | added)
        args.eval_datasets = eval_sets(args)
        return args


DROPPED = "rollout/dropped_"  # metrics of this prefix count groups; they add up over calls
SFT_ROLLOUT = "fusionrl.rollout.sft_rollout.generate_rollout"
MAX_REFILLS = 10  # calls of a rollout function that keeps returning too few groups


class RolloutFunctions:
    """Calls --rollout-function-path and --eval-function-path with `args` and the data source.

    where         flag and path of a user's own rollout function; None for the default one
    keeps_groups  whether that function says that it keeps groups between its calls; None: it does not say
    """

    def __init__(self, config: Config, source: PromptSource) -> None:
        rollout = config.rollout
        self._source, self._path = source, rollout.rollout_function_path
        self.where = None if self._path == DEFAULT_ROLLOUT else f"--rollout-function-path {self._path}"
        is_sft = config.run.mode == "sft" and not has_own_rollout(config)
        self._function = _rollout_function(SFT_ROLLOUT if is_sft else self._path)
        self._eval_field = "eval_function_path" if rollout.eval_function_path else "rollout_function_path"
        self._eval_path = rollout.eval_function_path or self._path
        self._eval_function = _rollout_function(self._eval_path)
        self.keeps_groups: bool | None = getattr(self._function, "keeps_groups", None)

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


def _rollout_function(path: str) -> Callable[..., object]:
    """Return the function of a path with slime's signature; each call makes another object of a class."""
    function = load_function(path)
    if not inspect.isclass(function):
        return function
    from fusionrl.rollout.miles_inputs import RolloutObject

    return RolloutObject(function)


class Collector:
    """Collects --rollout-batch-size groups: generated, scored, filtered and numbered."""

    def __init__(
        self, config: Config, plan: Plan, border: HookBorder, functions: RolloutFunctions, source: PromptSource
    ) -> None:
        self._config, self._plan = config, plan
        self._border, self._functions, self._source = border, functions, source

    def collect(self, rollout_id: int) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of one rollout, group after group, chosen and checked, and the function's own metrics.

        The rollout function is called until there are enough groups.
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
        samples = self.choose(groups, refused)
        self._ask_teacher(args, samples)  # about those of a user's rollout function
        return samples, {**metrics, **dropped}

    def call(self, rollout_id: int, data_source: object) -> RolloutFnTrainOutput:
        """Call the rollout function once, with `data_source`. Returns its groups, scored and filtered; `metrics` and
        `refused` also have what was filtered here.
        """
        args = self._border.args()
        output = self._call(args, rollout_id, data_source)
        dropped: Counter[str] = Counter()
        groups = self._finish(args, output, dropped)
        self._ask_teacher(args, flatten(groups))
        for name, count in dropped.items():
            output.metrics[name] = output.metrics.get(name, 0.0) + count
        return RolloutFnTrainOutput(groups, output.metrics, output.refused)

    def choose(self, groups: list[list[Sample]], refused: list[list[Sample]], is_stream: bool = False) -> list[Sample]:
        """Cut the groups to the batch; number and check their samples.

        The hook that sees all finished groups comes before; the one that marks samples comes after.

        refused    groups that only the first hook sees: a stream's behind the others, else in order of their samples
        is_stream  the stream alone draws prompts; else that hook may, too
        """
        assert self._plan.batch is not None
        if show_all := self._border.hook("rollout_all_samples_process_path"):
            finished = [*groups, *refused] if refused or is_stream else groups
            if refused and not is_stream:
                finished.sort(key=lambda group: group[0].index or 0)
            show_all(self._border.args(), finished, _no_prompts if is_stream else self._source.hooked.get_samples)
        path = self._config.rollout.rollout_function_path
        groups = groups[: self._plan.batch.num_prompts]
        if mark_removed := self._border.hook("rollout_sample_filter_path"):
            mark_removed(self._border.args(), groups)
        for position, group in enumerate(groups):
            # Samples that a rollout function made without a group get their group's number, or one below zero.
            number = next((s.group_index for s in group if s.group_index is not None), -2 - position)
            for sample in group:
                sample.group_index = number if sample.group_index is None else sample.group_index
            check_samples("rollout_function_path", path, group, limits_of(self._plan), are_new=False)
        return flatten(groups)

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

    @staticmethod
    def _ask_teacher(args: Namespace, samples: list[Sample]) -> None:
        """Fill in the teacher's log-probs where there is a teacher and the samples lack them."""
        if args.teacher_urls:
            from fusionrl.rollout.teacher import score_samples

            asyncio.run(score_samples(args, samples))


def _no_prompts(num_samples: int) -> list[list[Sample]]:
    raise RuntimeError(
        f"get_samples({num_samples}): under a pipeline that runs ahead the stream alone draws prompts, or some would"
        " never be trained; take --pipeline on-policy"
    )


def limits_of(plan: Plan) -> Limits:
    """Return the limits of the plan's model, against which numbers in samples are checked."""
    return Limits(plan.shape.vocab_size, plan.shape.num_experts or None)
