"""From a sample to its reward: a process of the pool calls what scores it. Metrics of rewards; penalties for length."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, SupportsFloat, TypeGuard

import numpy as np

from fusionrl.base.process import made_once
from fusionrl.config.hooks import register_hooks
from fusionrl.config.user_code import HookError
from fusionrl.data.sample import REWARD_LOST, Sample
from fusionrl.data.sample_images import keep_images
from fusionrl.observe.spans import part
from fusionrl.rewards.registry import MODEL, REASONS, names_of
from fusionrl.rewards.reward_call import (
    LostReward,
    RewardRaised,
    RewardSettings,
    call_reward,
    is_async,
    scorer_of,
    takes_a_list,
)

if TYPE_CHECKING:
    from fusionrl.config.rollout import RewardGroup
    from fusionrl.rewards.pool import RewardPool

logger = logging.getLogger(__name__)

_lost: Counter[str] = Counter()
_lost_here: ContextVar[Counter[str]] = ContextVar("lost", default=_lost)
_lock = threading.Lock()


class RewardError(HookError):
    """A reward function raised, or did not return a reward; the message names function and sample."""


async def async_rm(args: Namespace, sample: Sample, **kwargs: object) -> float | dict[str, object]:
    """The reward of one sample by the flags `args`; 0 where there is none but a teacher's word (--use-opd).

    A function that hangs (over --reward-timeout-s) or takes its process down costs the sample its reward: it is
    counted, its status is FAILED and its reward 0; or it gets --reward-failure-value where that is given. With it, the
    same holds for a function that raises, or returns neither a finite number nor a dict. Raises RewardError if the
    function raised, or returned no number and no dict, without --reward-failure-value.
    """
    return await score_sample(RewardSettings.of_args(args), sample, **kwargs)


async def batched_async_rm(
    args: Namespace, samples: Sequence[Sample], **kwargs: object
) -> list[float | dict[str, object]]:
    """The rewards of a group: in one call with --group-rm, one call a sample otherwise.

    If --custom-rm-path takes `samples`, several samples that a generate function made of one are also one call.
    """
    return await score_group(RewardSettings.of_args(args), samples, **kwargs)


async def score_sample(settings: RewardSettings, sample: Sample, **kwargs: object) -> float | dict[str, object]:
    """Return the reward of one sample; see `async_rm`."""
    path, rm_type, name = scorer_of(settings, sample)
    if path is None and not rm_type:
        if settings.is_optional:
            return 0.0
        raise RewardError(
            f"sample {sample.index} has no reward: neither --rm-type nor --custom-rm-path is given, so your function"
            " has to set sample.reward; or give one of them",
            [sample],
        )
    start = time.monotonic_ns()
    try:
        if path is None and MODEL in names_of(rm_type):
            from fusionrl.rewards.reward_model import model_score

            assert settings.args is not None
            try:
                score = await model_score(settings.args, sample)
            except (RuntimeError, ValueError) as error:
                raise RewardError(f"{name}: {error} at sample {sample.index}", [sample]) from error
            if rm_type == MODEL or isinstance(score, LostReward):
                return _checked(settings, score, name, sample)
            kwargs = {"model_score": score}
        reward = await _score(settings, [sample], "sample", path, name, kwargs)
        return _checked(settings, reward, name, sample)
    finally:
        part("reward", start, index=-1 if sample.index is None else sample.index)


async def score_group(
    settings: RewardSettings, samples: Sequence[Sample], **kwargs: object
) -> list[float | dict[str, object]]:
    """Return the rewards of a group; see `batched_async_rm`."""
    path = settings.custom_rm_path
    is_one_call = settings.is_group_call or takes_a_list(path)
    if not is_one_call or any(sample.custom_rm_path for sample in samples):
        return list(await asyncio.gather(*(score_sample(settings, sample, **kwargs) for sample in samples)))
    name = f"--custom-rm-path {path}"
    start = time.monotonic_ns()
    rewards = await _score(settings, samples, "group", path, name, kwargs)
    part("reward", start, samples=len(samples))
    if isinstance(rewards, list | tuple) and len(rewards) == len(samples):
        return [_checked(settings, reward, name, sample) for reward, sample in zip(rewards, samples, strict=True)]
    if not isinstance(rewards, LostReward):
        problem = f"of several samples it must return a list of {len(samples)} rewards, got {rewards!r}"
        rewards = _failed(settings, f"{name}: {problem}", problem, samples)
    return [_without_reward(settings, sample, rewards, name) for sample in samples]


@contextmanager
def counting_lost() -> Iterator[Counter[str]]:
    """Count lost rewards within the block apart from `lost_metrics`: an evaluation may run during a rollout."""
    counts: Counter[str] = Counter()
    token = _lost_here.set(counts)
    try:
        yield counts
    finally:
        _lost_here.reset(token)


METRICS = """
rollout/reward_timeout | samples | Samples without a reward because the reward function took too long. | when it
    happens
rollout/reward_crash | samples | Samples without a reward because the reward function took its process down. | when it
    happens
rollout/reward_error | samples | Samples whose reward function raised, or returned no finite number. |
    --reward-failure-value
rollout/code_failed/<reason> | samples | Samples with a program that failed for this reason (docs/guides/rewards.md).
    | --rm-type code, when it happens
rollout/reward_<part> | reward | Mean of one part of a weighted sum of rewards, before its weight. | several rewards
    in --rm-type
"""


def lost_metrics() -> dict[str, float]:
    """Return how many samples got no reward since the last call, and why."""
    metrics = {}
    with _lock:
        for reason, count in _lost.items():
            metrics[f"rollout/reward_{reason}"] = float(count)
        _lost.clear()
    return metrics


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return means of the parts of a weighted sum, and samples with a program that failed, by reason."""
    metrics: dict[str, float] = {}
    parts: dict[str, list[float]] = {}
    for graded in metadata_entries(samples, "rewards"):
        for name, value in graded.items():
            if isinstance(value, float):
                parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        metrics[f"rollout/reward_{name}"] = float(np.mean(values))
    for failed in metadata_entries(samples, "code_failures"):
        for name in REASONS:
            if name in failed:
                metrics[f"rollout/code_failed/{name}"] = metrics.get(f"rollout/code_failed/{name}", 0.0) + 1
    return metrics


def metadata_entries(samples: Sequence[Sample], name: str) -> list[dict[str, object]]:
    """The dictionaries of this name in samples' metadata; a user's data may have another column of that name."""
    entries = []
    for sample in samples:
        value = (sample.metadata or {}).get(name)
        if isinstance(value, dict):
            entries.append(value)
    return entries


@made_once
def reward_pool(num_processes: int) -> RewardPool:
    """The pool of this process, of rollouts and evaluations; its processes start when there is something to score."""
    from fusionrl.rewards.pool import RewardPool

    return RewardPool(num_processes)


@made_once
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of all plain functions: one debugger's prompt at a time. The event loop runs meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


async def _score(
    settings: RewardSettings,
    samples: Sequence[Sample],
    call: str,
    path: str | None,
    name: str,
    kwargs: dict[str, object],
) -> object:
    """Let a process of the pool call the function of `path`, or the built-in reward where that is None."""
    call_settings, asynchronous = settings.for_call(path), is_async(path)
    try:
        if settings.in_process:
            return await _score_here(call_settings, samples, call, path, kwargs)
        pool = reward_pool(settings.num_processes or len(os.sched_getaffinity(0)))
        limit_s = settings.timeout_s
        future = pool.submit(
            call_settings.packed(), samples, call=call, kwargs=kwargs, limit_s=limit_s, is_async=asynchronous
        )
        return await asyncio.wrap_future(future)
    except RewardRaised as error:
        blamed = [samples[position] for position in error.positions] or list(samples)
        error.add_note(f"In the reward process:\n{error.trace}")  # for the log, which has the traceback in full
        text = "\n".join(filter(None, [f"{name}: {error} at sample {blamed[0].index}", error.frames]))
        return _failed(settings, text, str(error), blamed, error)


async def _score_here(
    settings: RewardSettings, samples: Sequence[Sample], call: str, path: str | None, kwargs: dict[str, object]
) -> object:
    """Call a reward function in this process (--in-process): a breakpoint in it stops in the terminal.

    Nothing guards against a function that hangs or ends its process, and no time limit applies. Raises RewardRaised,
    whose cause is what the function raised.
    """
    register_hooks(settings.hooks)
    calling = functools.partial(call_reward, settings, list(samples) if call == "group" else samples[0], **kwargs)
    try:
        reward = calling() if is_async(path) else await asyncio.wrap_future(_thread().submit(calling))
        reward = await reward if inspect.isawaitable(reward) else reward
    except Exception as error:  # a user's function may raise anything
        raise RewardRaised.of(error, path, samples) from error
    keep_images(samples)
    return reward


def _failed(
    settings: RewardSettings, text: str, problem: str, samples: Sequence[Sample], cause: RewardRaised | None = None
) -> LostReward:
    """Count the rewards of `samples` as lost, because their function failed; without --reward-failure-value raise."""
    if settings.failure_value is not None:
        return LostReward("error", problem)
    offer = "with --reward-failure-value 0 the run continues: such samples get the reward 0 and are counted"
    raise RewardError(f"{text}\n{offer}", samples) from cause


def _without_reward(settings: RewardSettings, sample: Sample, lost: LostReward, name: str) -> float:
    value = settings.failure_value
    causes = {"timeout": f"no reward after {settings.timeout_s} s", "crash": "its process died"}
    then = "it is not trained on" if value is None else f"it gets {value} (--reward-failure-value)"
    logger.warning("%s: %s at sample %s; %s", name, causes.get(lost.reason, lost.detail), sample.index, then)
    sample.metadata[REWARD_LOST] = lost.reason
    if value is None:
        sample.status = Sample.Status.FAILED
    with _lock:
        _lost_here.get()[lost.reason] += 1
    return value or 0.0  # a number also where it counts for nothing: users' filters may compare it


def _checked(settings: RewardSettings, reward: object, name: str, sample: Sample) -> float | dict[str, object]:
    if isinstance(reward, dict):
        key = getattr(settings.args, "reward_key", None)  # a missing one is a mistake in the flags: its reader names it
        if settings.failure_value is None or key not in reward or _is_number(reward[key]):
            return reward
    elif _is_number(reward):
        return float(reward)
    if not isinstance(reward, LostReward):
        problem = f"it returned {reward!r} for sample {sample.index}; a finite number or a dict is wanted"
        reward = _failed(settings, f"{name}: {problem}", problem, [sample])
    return _without_reward(settings, sample, reward, name)


def _is_number(reward: object) -> TypeGuard[SupportsFloat]:
    """Return whether `reward` is one finite number; not for an array of several, or an integer beyond all floats."""
    try:
        return isinstance(reward, SupportsFloat) and math.isfinite(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


# ---------------------------------------------------------------- length
def soft_overlong_punishment(length: int, max_length: int, buffer_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), in [-1, 0]; lengths in tokens.

    0 up to max_length - buffer_length, then falling linearly to -1 at max_length, and -1 beyond. Raises ValueError if
    the buffer is empty or longer than max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"the overlong buffer of {buffer_length} tokens must lie between 1 and {max_length}")
    return max(-1.0, min(0.0, (max_length - buffer_length - length) / buffer_length))


def length_penalty(length: int, max_length: int, coef: float) -> float:
    """A price for each token: -coef at max_length tokens, half of it at half the length."""
    return -coef * length / max_length


def length_reward(length: int, max_length: int | None, flags: RewardGroup | Namespace) -> float:
    """Return what --length-penalty-coef, --overlong-buffer-len and --overlong-penalty-factor add to the reward of a
    response of `length` tokens, at most 0; 0 without any."""
    if max_length is None:  # only in runs without these flags, as the checks see to
        return 0.0
    added = length_penalty(length, max_length, flags.length_penalty_coef)
    if flags.overlong_buffer_len is not None:
        overlong = soft_overlong_punishment(length, max_length, flags.overlong_buffer_len)
        added += flags.overlong_penalty_factor * overlong
    return added
