"""Scoring in this process (--in-process): a breakpoint in a reward function stops in the terminal.

Nothing guards against a function that hangs or ends its process; no time limit applies.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fusionrl.config.hooks import register_hooks
from fusionrl.data.sample import Sample
from fusionrl.rewards.reward_call import RewardRaised, call_reward, reward_path
from fusionrl.rewards.settings import Grading


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of all plain functions: one debugger's prompt at a time. The event loop runs meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


async def score_here(
    grading: Grading, samples: Sequence[Sample], *, call: str, kwargs: Mapping[str, object], is_async: bool
) -> object:
    """Return what the reward function returns for a sample, or for the group where `call` is "group".

    Raises:
        RewardRaised: the function raised, which is its cause.
    """
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
        raise RewardRaised.of(error, reward_path(grading, samples[0]), samples) from error
