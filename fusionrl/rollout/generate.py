"""One sample and one group: generated and scored, each by the user's function where there is one."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.config.hooks import HookError, awaited_hook, call_hook, user_code
from fusionrl.data.attempts import join_attempt
from fusionrl.data.sample import Sample, is_reward_lost, lacks_reward, reward_value
from fusionrl.data.sample_images import keep_images, prompt_of
from fusionrl.observe.spans import course, part
from fusionrl.rewards.dispatch import score_group, score_sample
from fusionrl.rewards.length import length_reward
from fusionrl.rewards.settings import RewardSettings
from fusionrl.rollout.event_loop import LoopSemaphore
from fusionrl.rollout.generate_state import is_stopping, semaphore_of
from fusionrl.rollout.image_requests import barred_parts
from fusionrl.rollout.in_flight import GENERATED, SCORED, samples_in_flight
from fusionrl.rollout.miles_inputs import generate_function
from fusionrl.rollout.model_turn import SamplingParams, generate
from fusionrl.rollout.time_limit import within
from fusionrl.rollout.types import DynamicFilterOutput, Limits, check_samples
from fusionrl.rollout.weight_versions import (
    OriginalResponse,
    fill_versions,
    noting_answers,
    warn_of_unsampled,
    warn_once,
)

_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True)
class SampleContext:
    """Settings by which the samples and groups of a rollout, or of an evaluation set, are generated and scored.

    args                 as users' functions get them
    generate_path        --custom-generate-function-path
    sample_hooks         --rollout-sample-hook-path
    filter_path          --dynamic-sampling-filter-path
    semaphore            bounds the samples under way
    policy_urls          of the engines and their router
    needs_greedy_answer  the estimator compares with the greedy answer to the prompt
    timeout_s            --sample-timeout
    on_generated         called when a sample needs no engine any more
    """

    args: Namespace
    generate_path: str | None
    sample_hooks: tuple[str, ...]
    filter_path: str | None
    semaphore: LoopSemaphore
    rewards: RewardSettings
    limits: Limits
    policy_urls: tuple[str, ...]
    needs_greedy_answer: bool
    timeout_s: float | None = None
    on_generated: Callable[[], None] | None = None

    @classmethod
    def of_args(cls, args: Namespace) -> SampleContext:
        """Read them from a hook's `args`, which a user may have made."""
        urls = [getattr(args, "router_url", None), *(getattr(args, "engine_urls", None) or ())]
        estimator = getattr(args, "advantage_estimator", None)
        return cls(
            args=args,
            generate_path=args.custom_generate_function_path,
            sample_hooks=tuple(args.rollout_sample_hook_path or ()),
            filter_path=getattr(args, "dynamic_sampling_filter_path", None),
            semaphore=semaphore_of(args),
            rewards=RewardSettings.of_args(args),
            limits=Limits.of_args(args),
            policy_urls=tuple(url for url in urls if url),
            needs_greedy_answer=estimator is not None and ESTIMATORS[estimator].needs_greedy_answer,
            timeout_s=getattr(args, "sample_timeout", None),
        )


async def generate_and_score(
    context: SampleContext, sample: Sample, params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample and score it; a user's function may make several of it."""
    is_lost = sample.status == Sample.Status.FAILED and is_reward_lost(sample)
    if not evaluation and (sample.status in _FINISHED or is_lost):
        return sample  # a sibling of one that was aborted in an earlier rollout: it is finished and scored
    with course(index=_number(sample.index), group=_number(sample.group_index), evaluation=int(evaluation)) as facts:
        result = await _generate_and_score(context, sample, params, evaluation)
        for last in as_list(result)[-1:]:
            facts |= {"status": str(getattr(last.status, "value", last.status)), "tokens": int(last.response_length)}
    return result


def _number(index: int | None) -> int:
    return -1 if index is None else int(index)


async def _generate_and_score(
    context: SampleContext, sample: Sample, params: SamplingParams, evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or context.generate_path
    making: Coroutine[Any, Any, Sample | list[Sample]]
    start = time.monotonic_ns()
    async with context.semaphore:
        part("wait", start)
        if path is None:
            making = generate(context.args, sample, params)
        else:
            making = custom_generate(context, path, sample, params, evaluation)
        with samples_in_flight.note(GENERATED, sample):
            result = await within(context.timeout_s, sample, making)
    if context.on_generated is not None:
        context.on_generated()
    samples = as_list(result)
    join_attempt(samples, sample.index)
    if context.sample_hooks:
        samples = [await apply_sample_hooks(context, item, evaluation) for item in samples]
    with samples_in_flight.note(SCORED, sample):
        await _score(context, samples, isinstance(result, list), evaluation)
    for item in samples:
        samples_in_flight.scored(item)
    return samples if isinstance(result, list) else samples[0]


async def _score(context: SampleContext, samples: list[Sample], are_several: bool, evaluation: bool) -> None:
    """Fill in the rewards that are missing; those of --group-rm wait for the group."""
    if context.rewards.is_group_call:
        if evaluation:  # an evaluation has no groups: the group function sees one sample at a time
            for item in samples:
                item.reward = (await score_group(context.rewards, [item]))[0]
        return
    missing = [item for item in samples if item.reward is None and not lacks_reward(item)]
    if missing and are_several:
        for item, reward in zip(missing, await score_group(context.rewards, missing), strict=True):
            item.reward = reward
    elif missing:
        missing[0].reward = await score_sample(context.rewards, missing[0])


async def custom_generate(
    context: SampleContext, path: str, sample: Sample, params: SamplingParams, evaluation: bool
) -> Sample | list[Sample]:
    """Call the user's generate function on a sample; returns one or several, each checked.

    Raises HookError if it raised, or returned something other than samples, or one whose fields do not fit together.
    """
    function = generate_function(path)
    keywords = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    field, before = "custom_generate_function_path", OriginalResponse.of(sample)
    where = f"--custom-generate-function-path {path}"
    if vars(sample)["weight_versions"] is None:
        sample.weight_versions = []  # slime's functions append to it
    with noting_answers(context.policy_urls) as answers, user_code(where, path, sample):
        answers.barred += barred_parts(sample)
        answers.adapter = sample.adapter
        result = function(context.args, sample, copy.deepcopy(params), **keywords)
        if inspect.isawaitable(result):
            result = await result
        else:
            warn_once(
                f"{where}: not async",
                f"{where}: it is not async, so all other samples wait for as long as it runs; write async def, and"
                " await what takes time",
            )
    samples = as_list(result)
    valid = [item for item in samples if isinstance(item, Sample)]
    for item in valid:
        item.adapter = item.adapter or sample.adapter
    warn_of_unsampled(valid, answers, where, before)
    fill_versions(valid, answers, where, before)
    check_samples(field, path, samples, context.limits)
    return result


async def apply_sample_hooks(context: SampleContext, sample: Sample, evaluation: bool) -> Sample:
    """Return the sample as the functions of --rollout-sample-hook-path leave it."""
    field = "rollout_sample_hook_path"
    for path in context.sample_hooks:
        rollout_id = getattr(context.args, "rollout_id", None)
        output = await awaited_hook(field, path, context.args, sample, rollout_id=rollout_id, evaluation=evaluation)
        sample = sample if output is None else output
        check_samples(field, path, [sample], context.limits)
    return sample


def as_list(result: Sample | list[Sample]) -> list[Sample]:
    """Return the samples that a generate function made of one."""
    return result if isinstance(result, list) else [result]


# ------------------------------------------------------------------------------------------------ a group
async def generate_group(context: SampleContext, group: list[Sample], params: SamplingParams) -> list[Sample]:
    """Make all samples of one prompt; with --group-rm they are scored together, once all are finished.

    Where the greedy answer that the estimator needs has no reward, nothing compares with it: its group is FAILED.
    """
    return [sample for result in await generate_siblings(context, group, params) for sample in as_list(result)]


async def generate_siblings(
    context: SampleContext, group: list[Sample], params: SamplingParams, evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """As `generate_group`; what a generate function made of one sample stays together, as slime returns it."""
    makes = asyncio.gather(*(generate_and_score(context, sample, dict(params), evaluation) for sample in group))
    needs_baseline = context.needs_greedy_answer and not evaluation and group[0].baseline_reward is None
    baseline: float | None = None
    if needs_baseline:
        results, baseline = await asyncio.gather(makes, _greedy_reward(context, group[0], params))
    else:
        results = await makes
    samples = [s for result in results for s in as_list(result)]
    comes_again = is_stopping(context.args) and any(s.status == Sample.Status.ABORTED for s in samples)
    if context.rewards.is_group_call and not comes_again and any(s.reward is None for s in samples):
        for sample, reward in zip(samples, await score_group(context.rewards, samples), strict=True):
            sample.reward = reward
    if needs_baseline:
        for sample in samples:
            sample.baseline_reward = baseline
            if baseline is None and not is_stopping(context.args):  # else the next rollout computes it
                sample.status = Sample.Status.FAILED
    return results


async def _greedy_reward(context: SampleContext, sample: Sample, params: SamplingParams) -> float | None:
    """The reward of the greedy answer to a sample's prompt, shaped as others are; None where it has none."""
    samples = await generate_and_score(context, prompt_of(sample), dict(params, temperature=0.0, top_p=1.0, top_k=-1))
    answer = as_list(samples)[0]
    rewards, args = context.rewards, context.args
    if answer.reward is None and not lacks_reward(answer):
        answer.reward = (await score_group(rewards, [answer]))[0]
    if lacks_reward(answer):  # one that failed is as one whose reward function fails
        return None if answer.status == Sample.Status.ABORTED else rewards.failure_value
    try:
        value = reward_value(answer.reward, args.reward_key, "--reward-key")
    except ValueError as error:
        raise ValueError(f"sample {answer.index}: {error}") from error
    return value + length_reward(answer.response_length, args.rollout_max_response_len, args)


def apply_filter(path: str | None, args: Namespace, group: list[Sample]) -> DynamicFilterOutput:
    """Ask the dynamic sampling filter `path`, if there is one, about a finished group; a bare bool is accepted.

    Raises HookError if it raised, or returned something else.
    """
    if path is None:
        return DynamicFilterOutput(True)
    verdict = call_hook("dynamic_sampling_filter_path", path, args, group)
    keep_images(group)
    if isinstance(verdict, bool | np.bool_):
        return DynamicFilterOutput(bool(verdict))
    if not hasattr(verdict, "keep"):
        problem = f"it returned {type(verdict).__name__}; a DynamicFilterOutput or a bool is wanted"
        raise HookError(f"--dynamic-sampling-filter-path {path}: {problem}", group)
    fallback = bool(getattr(verdict, "keep_when_insufficient", False))
    return DynamicFilterOutput(bool(verdict.keep), getattr(verdict, "reason", None), fallback)
