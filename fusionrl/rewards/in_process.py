"""Scoring in this process (--in-process): a breakpoint in a reward function stops in the terminal.

Nothing guards against a function that hangs or ends its process; no time limit applies.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import register_hooks
from fusionrl.config.user_code import blamed_samples, user_frames
from fusionrl.data.sample import Sample
from fusionrl.rewards.pool import RewardRaised
from fusionrl.rewards.reward_call import call_reward, reward_path
from fusionrl.rewards.settings import Grading


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of all plain functions: one debugger's prompt at a time. The event loop runs meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


async def score_here(
    grading: Grading,
    args: Namespace | None,
    samples: Sequence[Sample],
    *,
    call: str,
    kwargs: Mapping[str, object],
    is_async: bool,
) -> object:
    """Return what the reward function returns for a sample, or for the group where `call` is "group".

    Raises:
        RewardRaised: the function raised, which is its cause.
    """
    if args is not None:
        values = {name: value for name, value in vars(args).items() if name not in HookArgs.SHARED}
        grading = replace(grading, args=Namespace(**values))
    register_hooks(grading.hooks)
    target = list(samples) if call == "group" else samples[0]
    try:
        if is_async:
            reward = call_reward(grading, target, **kwargs)
        else:
            calling = functools.partial(call_reward, grading, target, **kwargs)
            reward = await asyncio.wrap_future(_thread().submit(calling))
        return await reward if inspect.isawaitable(reward) else reward
    except Exception as error:  # a user's function may raise anything
        path = reward_path(grading, samples[0])
        blamed = set(map(id, blamed_samples(error, path)))
        positions = [position for position, sample in enumerate(samples) if id(sample) in blamed]
        text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        raise RewardRaised(text, user_frames(error, path), trace, positions) from error
