"""Rollout functions as slime's users write them, with its imports: each runs its coroutines in another way."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, abort, generate, generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.types import Sample

STATE: Any = None  # kept over rollouts, as slime's singleton is


async def whole_groups(args: Any, groups: list[list[Sample]]) -> list[list[Sample]]:
    """All samples of all groups at once."""
    global STATE
    STATE = STATE or GenerateState(args)
    assert get_rollout_num_engines(args) == 1 and not STATE.aborted
    params = GenerateState(args).sampling_params
    async with STATE.semaphore:
        pass
    return await asyncio.gather(*(generate_and_rm_group(args, group, params.copy()) for group in groups))


def by_asyncio_run(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput(samples=asyncio.run(whole_groups(args, groups)))


def by_the_process_loop(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    return run(whole_groups(args, data_source.get_samples(args.rollout_batch_size)))


def in_a_thread(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    groups = data_source.get_samples(args.rollout_batch_size)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, whole_groups(args, groups)).result()


def one_by_one(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    """A loop for each call; the first by `generate` alone, which leaves the reward open."""
    (group,) = data_source.get_samples(1)
    params = GenerateState(args).sampling_params
    first = asyncio.run(generate(args, group[0], params.copy()))
    assert first.reward is None and first.tokens[-first.response_length :] and type(first.tokens) is list
    group[0].reward = 0.5
    return [[first, *(asyncio.run(generate_and_rm(args, sample, params.copy())) for sample in group[1:])]]


async def _until_full(args: Any, rollout_id: int, get_samples: Any) -> tuple[list[Any], list[Any]]:
    """slime's own loop in short: submit, wait for the first, and abort the rest when there are enough."""
    state = GenerateState(args)
    data: list[Any] = []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        data += [task.result() for task in done]
    aborted = await abort(args, rollout_id)
    assert state.aborted
    state.reset()
    return data[: args.rollout_batch_size], aborted


def with_abort(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Sample]]:
    data, aborted = run(_until_full(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted)
    return data


async def lists(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A generate function with idioms of lists: joined, extended in place, asked whether they are empty."""
    assert not sample.tokens and sample.loss_mask is None
    sample.weight_versions.append("4")  # type: ignore[union-attr]
    sample.prompt = f"{sample.prompt}!"
    sample = await generate(args, sample, sampling_params)
    sample.tokens = sample.tokens + [7]  # type: ignore[operator]
    sample.loss_mask += [0]  # type: ignore[operator]
    sample.rollout_log_probs.append(0.0)  # type: ignore[union-attr]
    sample.response_length += 1
    return sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """In a process of its own, which knows the name `slime`, too."""
    assert isinstance(sample, Sample) and isinstance(sample.tokens, list)
    return float(len(sample.tokens))


async def fails(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise RuntimeError("no luck")


TRIED: set[Any] = set()


async def aborted_at_first(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.index not in TRIED:
        TRIED.add(sample.index)
        sample.tokens, sample.response = [1, 2], "half"
        sample.response_length, sample.status = 1, Sample.Status.ABORTED
        return sample
    assert not sample.response
    return await generate(args, sample, sampling_params)
