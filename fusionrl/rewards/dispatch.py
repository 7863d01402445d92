"""From a sample to its reward: the sample's own function, --custom-rm-path or --rm-type, in a process of the pool."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import math
import os
import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fusionrl.config.config import HookArgs
from fusionrl.config.user_code import HookError, with_frames
from fusionrl.data.sample import Sample
from fusionrl.rewards.calls import is_async, reward_name, reward_path, rm_type_of, takes_a_list
from fusionrl.rewards.model import model_score
from fusionrl.rewards.pool import Lost, RewardPool, RewardRaised
from fusionrl.rewards.registry import MODEL, asks_model

logger = logging.getLogger(__name__)

_lost: Counter[str] = Counter()
_lock = threading.Lock()


class RewardError(HookError):
    """A reward function raised or returned what is no reward; the message names function and sample."""


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, Any]:
    """The reward of one sample; 0 where there is none but a teacher's word (--use-opd).

    A function that hangs (over --reward-timeout-s) or takes its process down costs the sample its reward: it gets
    --reward-failure-value, and is counted.

    Raises:
        RewardError: the function raised, or returned no number and no dict.
    """
    name, path, rm_type = reward_name(args, sample), reward_path(args, sample), rm_type_of(args, sample)
    if path is None and not rm_type and getattr(args, "use_opd", False):
        return 0.0
    if path is None and asks_model(rm_type):
        score = await _model_score(args, sample, name)
        if isinstance(score, Lost):
            return _without_reward(args, sample, score, name)
        if rm_type == MODEL:
            return score
        kwargs = {"model_score": score}
    reward = await _score(args, [sample], "sample", path, name, kwargs)
    return _without_reward(args, sample, reward, name) if isinstance(reward, Lost) else _checked(reward, name, sample)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of a group: in one call with --group-rm, one call a sample otherwise.

    In one call, too, where --custom-rm-path takes `samples`: what a generate function made of one prompt, say.
    """
    is_one_call = args.group_rm or (args.custom_rm_path and takes_a_list(args.custom_rm_path))
    if not is_one_call or any(sample.custom_rm_path for sample in samples):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))
    name = f"--custom-rm-path {args.custom_rm_path}"
    rewards = await _score(args, samples, "group", args.custom_rm_path, name, kwargs)
    if isinstance(rewards, Lost):
        return [_without_reward(args, sample, rewards, name) for sample in samples]
    if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
        raise RewardError(
            f"{name}: of several samples it must return a list of {len(samples)} rewards, got {rewards!r}", samples
        )
    return [_checked(reward, name, sample) for reward, sample in zip(rewards, samples, strict=True)]


async def _model_score(args: Any, sample: Sample, name: str) -> float | Lost:
    try:
        score = await model_score(args, sample)
    except (RuntimeError, ValueError) as error:
        raise RewardError(f"{name}: {error} at sample {sample.index}", [sample]) from error
    return score if isinstance(score, Lost) else _checked(score, name, sample)


def take_lost() -> dict[str, int]:
    """How many samples got no reward since the last call, and why ("timeout", "crash")."""
    with _lock:
        found = dict(_lost)
        _lost.clear()
    return found


@functools.cache
def reward_pool(num_processes: int) -> RewardPool:
    """The pool of this process; its processes are started when there is something to score."""
    return RewardPool(num_processes)


async def _score(
    args: Any, samples: Sequence[Sample], call: str, path: str | None, name: str, kwargs: dict[str, Any]
) -> Any:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = reward_pool(getattr(args, "reward_num_processes", None) or cores)
    future = pool.submit(
        _plain(args), samples, call=call, kwargs=kwargs, limit_s=args.reward_timeout_s, is_async=is_async(path)
    )
    try:
        return await asyncio.wrap_future(future)
    except RewardRaised as error:
        blamed = [samples[position] for position in error.positions] or list(samples)
        error.add_note(f"In the reward process:\n{error.trace}")  # for the log, which has the traceback in full
        at = f"at sample {blamed[0].index}"
        raise RewardError(with_frames(f"{name}: {error} {at}", error.frames), blamed) from error


def _plain(args: Any) -> bytes:
    """`args` as another process can have them."""
    values = {name: value for name, value in vars(args).items() if name not in HookArgs.SHARED}
    whole = _pickled(argparse.Namespace(**values))
    if whole is not None:
        return whole
    return pickle.dumps(argparse.Namespace(**{name: one for name, one in values.items() if _pickled(one) is not None}))


def _pickled(value: Any) -> bytes | None:
    """None: it cannot be sent to another process, and stays here."""
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs code of whatever a hook put there
        return None


def _without_reward(args: Any, sample: Sample, lost: Lost, name: str) -> float:
    value = float(getattr(args, "reward_failure_value", 0.0))
    told = f"no reward after {args.reward_timeout_s} s" if lost.reason == "timeout" else "its process died"
    logger.warning("%s: %s at sample %s; it gets %s (--reward-failure-value)", name, told, sample.index, value)
    sample.metadata["reward_lost"] = lost.reason
    with _lock:
        _lost[lost.reason] += 1
    return value


def _checked(reward: Any, name: str, sample: Sample) -> Any:
    if isinstance(reward, dict):
        return reward
    if hasattr(reward, "__float__") and math.isfinite(reward):
        return float(reward)
    said = f"it returned {reward!r} for sample {sample.index}; a finite number or a dict is wanted"
    raise RewardError(f"{name}: {said}", [sample])
