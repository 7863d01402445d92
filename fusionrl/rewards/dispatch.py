"""From a sample to its reward: a process of the pool calls what scores it. Metrics of rewards; penalties for length."""

from __future__ import annotations

import asyncio
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsFloat, TypeGuard

import numpy as np

from fusionrl.base.process import made_once
from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import hook_values, load_function
from fusionrl.config.user_code import HookError
from fusionrl.data.sample import REWARD_LOST, Sample, lacks_reward
from fusionrl.data.sample_images import keep_images
from fusionrl.data.train_batch import attempt_shares, attempts_of
from fusionrl.observe.spans import part
from fusionrl.rewards.registry import MODEL, REASONS, REMOTE, REMOTE_PATH, names_of
from fusionrl.rewards.reward_call import LostReward, RewardCall, RewardRaised, Scorer, call_reward

if TYPE_CHECKING:
    from fusionrl.config.rollout import RewardGroup
    from fusionrl.rewards.pool import RewardPool

logger = logging.getLogger(__name__)

ACCURATE = 1.0  # a raw reward of at least this counts as a right answer
EQUAL = 1e-8  # rewards closer than this are equal
_lost: Counter[str] = Counter()
_lost_here: ContextVar[Counter[str]] = ContextVar("lost", default=_lost)
_lock = threading.Lock()


class RewardError(HookError):
    """A reward function raised, or did not return a reward; the message names function and sample."""


@dataclass(frozen=True)
class RewardSettings:
    """Everything that scoring a sample depends on, other than the sample; read from a hook's `args` once.

    args           of the hook that asks; a user's function gets them, and none of the others
    is_optional    a sample that nothing scores has the reward 0: a teacher teaches it (--use-opd)
    failure_value  the reward of a sample whose function hangs or takes its process down; None: it has none
    in_process     no other process scores (--in-process)
    """

    args: Namespace | None
    rm_type: str = ""
    custom_rm_path: str | None = None
    is_group_call: bool = False  # --group-rm
    is_optional: bool = False
    timeout_s: float = 60.0
    failure_value: float | None = None
    num_processes: int | None = None
    in_process: bool = False

    @classmethod
    def of_args(cls, args: Namespace) -> RewardSettings:
        """Read them from a hook's `args`, which a user may have made: only what every call needs must be there."""
        return cls(
            args=args,
            rm_type=args.rm_type or "",
            custom_rm_path=args.custom_rm_path,
            is_group_call=bool(getattr(args, "group_rm", False)),
            is_optional=bool(getattr(args, "use_opd", False)),
            timeout_s=args.reward_timeout_s,
            failure_value=getattr(args, "reward_failure_value", None),
            num_processes=getattr(args, "reward_num_processes", None),
            in_process=bool(getattr(args, "in_process", False)),
        )


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


def scorer_of(settings: RewardSettings, sample: Sample) -> Scorer:
    """Return what scores the sample.

    In this order: the sample's own function, --custom-rm-path, `rm_type` of the sample's metadata, --rm-type.
    """
    path = sample.custom_rm_path or settings.custom_rm_path
    own_type = sample.metadata.get("rm_type") if isinstance(sample.metadata, dict) else None
    rm_type = str(own_type or settings.rm_type)
    if path is not None:
        return Scorer(path, rm_type, f"--custom-rm-path {path}")
    if rm_type == REMOTE:
        return Scorer(REMOTE_PATH, rm_type, f"--rm-type {REMOTE} of --rm-url {getattr(settings.args, 'rm_url', None)}")
    origin = " of the sample's metadata" if own_type else ""
    return Scorer(None, rm_type, f"--rm-type {rm_type or None}{origin}")


async def score_sample(settings: RewardSettings, sample: Sample, **kwargs: object) -> float | dict[str, object]:
    """Return the reward of one sample; see `async_rm`."""
    scorer = scorer_of(settings, sample)
    if scorer.path is None and not scorer.rm_type:
        if settings.is_optional:
            return 0.0
        raise RewardError(
            f"sample {sample.index} has no reward: neither --rm-type nor --custom-rm-path is given, so your function"
            " has to set sample.reward; or give one of them",
            [sample],
        )
    start = time.monotonic_ns()
    try:
        if scorer.path is None and MODEL in names_of(scorer.rm_type):
            from fusionrl.rewards.reward_model import model_score

            assert settings.args is not None
            try:
                of_model = await model_score(settings.args, sample)
            except (RuntimeError, ValueError) as error:
                raise RewardError(f"{scorer.name}: {error} at sample {sample.index}", [sample]) from error
            if scorer.rm_type == MODEL or isinstance(of_model, LostReward):
                return _checked(settings, of_model, scorer.name, sample)
            kwargs = {"model_score": of_model}
        reward = await _reward_of(settings, call_of(settings, scorer, [sample], kwargs))
        return _checked(settings, reward, scorer.name, sample)
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
    scorer = Scorer(path, "", f"--custom-rm-path {path}")
    start = time.monotonic_ns()
    rewards = await _reward_of(settings, call_of(settings, scorer, samples, kwargs, is_group=True))
    part("reward", start, samples=len(samples))
    if isinstance(rewards, list | tuple) and len(rewards) == len(samples):
        each = zip(rewards, samples, strict=True)
        return [_checked(settings, reward, scorer.name, sample) for reward, sample in each]
    if not isinstance(rewards, LostReward):
        problem = f"of several samples it must return a list of {len(samples)} rewards, got {rewards!r}"
        rewards = _failed(settings, f"{scorer.name}: {problem}", problem, samples)
    return [_without_reward(settings, sample, rewards, scorer.name) for sample in samples]


def takes_a_list(path: str | None) -> bool:
    """Return whether a function scores several samples in a call: its second parameter is `samples`, as in slime."""
    if path is None:
        return False
    try:
        names = list(inspect.signature(load_function(path)).parameters)
    except ValueError:  # a builtin without a signature
        return False
    return names[1:2] == ["samples"]


def call_of(
    settings: RewardSettings,
    scorer: Scorer,
    samples: Sequence[Sample],
    kwargs: dict[str, object],
    is_group: bool = False,
) -> RewardCall:
    """Describe a call. A user's function gets all flags, but no value that belongs to the rollout's process; a built-in
    reward gets the few that it reads."""
    flags = {} if settings.args is None else vars(settings.args)
    args = None if scorer.path is None else Namespace()
    if args is not None and scorer.path == REMOTE_PATH:
        args.rm_url = flags["rm_url"]
    elif args is not None:  # for 400 flags, 50 times as fast as keyword arguments
        vars(args).update(flags)
        for name in HookArgs.SHARED:
            vars(args).pop(name, None)
    allows_weak = bool(flags.get("allow_weak_sandbox"))
    regex = flags.get("rm_format_regex")
    return RewardCall(scorer, samples, args, kwargs, is_group, regex, allows_weak, hook_values(flags))


async def _reward_of(settings: RewardSettings, call: RewardCall) -> object:
    """Let a process of the pool make a call, or with --in-process this one."""
    path = call.scorer.path
    is_async = path is not None and inspect.iscoroutinefunction(load_function(path))
    try:
        if settings.in_process:
            return await _called_here(call, is_async)
        pool = reward_pool(settings.num_processes or len(os.sched_getaffinity(0)))
        return await asyncio.wrap_future(pool.submit(call, settings.timeout_s, is_async))
    except RewardRaised as error:
        blamed = [call.samples[position] for position in error.positions] or list(call.samples)
        error.add_note(f"In the reward process:\n{error.trace}")  # for the log, which has the traceback in full
        text = "\n".join(filter(None, [f"{call.scorer.name}: {error} at sample {blamed[0].index}", error.frames]))
        return _failed(settings, text, str(error), blamed, error)


async def _called_here(call: RewardCall, is_async: bool) -> object:
    """Call a reward function in this process (--in-process): a breakpoint in it stops in the terminal.

    Nothing guards against a function that hangs or ends its process, and no time limit applies. Raises RewardRaised,
    whose cause is what the function raised.
    """
    try:
        reward = call_reward(call) if is_async else await asyncio.wrap_future(_thread().submit(call_reward, call))
        reward = await reward if inspect.isawaitable(reward) else reward
    except Exception as error:  # a user's function may raise anything
        raise RewardRaised.of(error, call) from error
    keep_images(call.samples)
    return reward


@made_once
def reward_pool(num_processes: int) -> RewardPool:
    """The pool of this process, of rollouts and evaluations; its processes start when there is something to score."""
    from fusionrl.rewards.pool import RewardPool

    return RewardPool(num_processes)


@made_once
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of all plain functions: one debugger's prompt at a time. The event loop runs meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


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
rollout/raw_reward | reward | Mean reward as the reward function gave it, before penalties and normalization; 0 for a
    failed sample.
rollout/raw_reward_std | reward | Standard deviation of these rewards over the samples.
rollout/accuracy | share | Share of samples with a raw reward of at least 1.
rollout/zero_std_groups | share | Share of groups whose raw rewards are all equal: of them nothing is learnt by
    estimators that compare within a group. Samples without a reward do not count.
rollout/<set>/raw_reward | reward | As rollout/raw_reward, of one set. | several --prompt-data
rollout/<set>/accuracy | share | As rollout/accuracy, of one set. | several --prompt-data
rollout/<set>/num_samples | samples | Samples of one set. | several --prompt-data
adapter/<name>/raw_reward | reward | As rollout/raw_reward, of the samples of one adapter. | a rollout with samples of
    it
adapter/<name>/accuracy | share | As rollout/accuracy, of the samples of one adapter. | a rollout with samples of it
adapter/<name>/num_samples | samples | Samples of the rollout that one adapter learns from. | a rollout with samples
    of it
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


def mean_metrics(name: str, samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Return `name`/raw_reward, accuracy (means over attempts) and num_samples of some samples of a rollout."""
    rewards, shares = np.asarray(raw, np.float64), attempt_shares(attempts_of(samples))
    return {
        f"{name}/raw_reward": float(np.average(rewards, weights=shares)),
        f"{name}/accuracy": float(np.average(rewards >= ACCURATE, weights=shares)),
        f"{name}/num_samples": float(len(samples)),
    }


def reward_metrics(samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Return mean, deviation and equal groups of a rollout's rewards, means of the parts of a weighted sum, and samples
    with a program that failed, by reason.

    raw  [n] rewards as the reward function gave them
    """
    metrics = mean_metrics("rollout", samples, raw)
    rewards, shares = np.asarray(raw, np.float64), attempt_shares(attempts_of(samples))
    deviations = rewards - metrics["rollout/raw_reward"]
    metrics["rollout/raw_reward_std"] = float(np.sqrt(np.average(deviations**2, weights=shares)))
    groups: dict[int | None, list[float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        groups.setdefault(sample.group_index, []).extend([] if lacks_reward(sample) else [reward])
    are_equal = [not group or max(group) - min(group) < EQUAL for group in groups.values()]
    metrics["rollout/zero_std_groups"] = float(np.mean(are_equal))
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
