"""Functions of a user's for tests of the stream: answers that take their time, by weights that change meanwhile."""

import asyncio
import threading
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import Generation
from fusionrl.plugin_api import generate_turn

VERSION = [0]  # of the engines' weights, as a test sets it
IN_FLIGHT: set[int] = set()
MOST = [0]  # samples that were in flight at once
CALLS: list[int] = []  # labels of the samples that `answer` was asked for
LENGTH = 4
FAILS = threading.Event()  # of `fails_when_told`


def seconds(sample: Sample, slow_s: float = 0.3) -> float:
    """Every fifth prompt is slow."""
    return slow_s if int(sample.label) % 5 == 0 else 0.01


async def answer(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample one half of the answer, wait, and sample the other half; "slow_s": how long a slow prompt's wait is."""
    IN_FLIGHT.add(sample.index)
    CALLS.append(int(sample.label))
    MOST[0] = max(MOST[0], len(IN_FLIGHT))
    try:
        versions = [VERSION[0]] * (LENGTH // 2)
        await asyncio.sleep(seconds(sample, sampling_params.get("slow_s", 0.3)))
        versions += [VERSION[0]] * (LENGTH // 2)
    finally:
        IN_FLIGHT.discard(sample.index)
    prompt = [1, 2, 3]
    sample.tokens, sample.response_length = [*prompt, *range(4, 4 + LENGTH)], LENGTH
    sample.loss_mask, sample.rollout_log_probs = [1] * LENGTH, [-0.5] * LENGTH
    sample.weight_versions = versions
    sample.response, sample.status = "x", Sample.Status.COMPLETED
    return sample


async def stale(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await answer(args, sample, sampling_params)
    sample.weight_versions = [0] * LENGTH
    return sample


async def fails_late(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if int(sample.label) == 5:
        raise KeyError("no such tool")
    return await answer(args, sample, sampling_params)


def parity(args: Namespace, sample: Sample) -> float:
    """Reward the samples of a group in turn."""
    return float((sample.index or 0) % 2)  # a greedy answer has no index


def odd_prompts(args: Namespace, group: list[Sample]) -> bool:
    return int(group[0].label) % 2 == 1


def nothing(args: Namespace, group: list[Sample]) -> bool:
    return False


SEEN: list[list[int]] = []  # labels of the groups of each batch, as `look_at_all` has seen them


def look_at_all(args: Namespace, groups: list[list[Sample]], get_samples: Any) -> None:
    assert all(sample.reward is not None for group in groups for sample in group)
    SEEN.append([int(group[0].label) for group in groups])


def draws_more(args: Namespace, groups: list[list[Sample]], get_samples: Any) -> None:
    get_samples(1)


def slow_look(args: Namespace, groups: list[list[Sample]]) -> None:
    """Look at a batch for a while; the stream goes on meanwhile."""
    time.sleep(0.3)


async def ignores_its_end(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Every fifth prompt takes very long; when it is cancelled, alternate between a return and an error."""
    try:
        await asyncio.sleep(1.5 if int(sample.label) % 5 == 0 else 0.0)
    except asyncio.CancelledError as error:
        if int(sample.label) % 2:
            return sample
        raise ValueError("I was cancelled") from error
    return await answer(args, sample, sampling_params)


async def fails_when_told(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Wait with the samples after the first batch until a test lets them fail."""
    if int(sample.label) >= 4:
        deadline = time.monotonic() + 3.0
        while not FAILS.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if FAILS.is_set():
            raise ValueError("no luck")
    return await answer(args, sample, sampling_params)


async def first_hangs(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Hang at one sample of the fourth prompt."""
    if int(sample.label) == 3 and sample.index % 2:
        CALLS.append(3)
        await asyncio.sleep(60.0)
    return await answer(args, sample, sampling_params)


async def odd_ones_fail(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await answer(args, sample, sampling_params)
    if int(sample.label) % 2:
        sample.status = Sample.Status.FAILED
    return sample


async def all_fail(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = Sample.Status.FAILED
    return sample


class Counting:
    """A data source of a user's own: prompts are numbers, its state is a file beside the checkpoint."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.next, self.threads = args, 0, set[str]()

    def __len__(self) -> int:
        return 1000

    def _here(self) -> None:
        self.threads.add(threading.current_thread().name)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self._here()
        self.next += num_samples
        first = self.next - num_samples
        return [
            [Sample(index=2 * n + k, group_index=n, prompt=f"p{n}", label=str(n)) for k in range(2)]
            for n in range(first, self.next)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError

    def _file(self, rollout_id: int) -> Path:
        return Path(self.args.run_dir) / f"counting-{rollout_id}"

    def save(self, rollout_id: int) -> None:
        self._here()
        assert self.threads == {"stream"}
        self._file(rollout_id).write_text(str(self.next))

    def load(self, rollout_id: int) -> None:
        self.next = int(self._file(rollout_id).read_text())


async def asks(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Ask an engine for two turns; a tool says something between them."""
    args.generate_client.generate = partial(slow_engine, load_tokenizer(args.hf_checkpoint))
    IN_FLIGHT.add(sample.index)
    try:
        sample.tokens = [1, 2, int(sample.label)]
        await generate_turn(args, sample, sampling_params, longest=4)
        sample.append_response_tokens(tokens=[9], trainable=False)
        await generate_turn(args, sample, sampling_params)
    finally:
        IN_FLIGHT.discard(sample.index)
    return sample


async def slow_engine(tokenizer: Any, payload: dict[str, Any], routing_key: str | None) -> Generation:
    """Sample by seed, place, last token and version; the third token of a prompt is its label."""
    prompt, params = payload["input_ids"], payload["sampling_params"]
    tokens, versions = list[int](), list[int]()
    while len(tokens) < params["max_new_tokens"]:
        await asyncio.sleep(seconds(Sample(label=str(prompt[2]))) / 4)
        versions.append(VERSION[0])
        place, last = len(prompt + tokens), (prompt + tokens)[-1]
        tokens.append((7 * params["sampling_seed"] + 31 * place + 5 * versions[-1] + last) % 101)
    ids = np.array(tokens, np.int32)
    spans: list[tuple[int | str, int]] = [(version, 1) for version in versions]
    return Generation(ids, ids / -101, tokenizer.decode(tokens), "length", spans, len(prompt), 0, {})


IN_TURN = [0, 0]  # samples that began in this turn of the loop, and in the fullest one


async def counts_turns(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Count how many samples begin before the loop looks after anything else."""
    if not IN_TURN[0]:
        asyncio.get_running_loop().call_soon(IN_TURN.__setitem__, 0, 0)
    IN_TURN[0] += 1
    IN_TURN[1] = max(IN_TURN)
    return await answer(args, sample, sampling_params)


async def failing_when_told(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `fails_when_told`, by the sample's status."""
    try:
        return await fails_when_told(args, sample, sampling_params)
    except ValueError:
        sample.status = Sample.Status.FAILED
        return sample


async def cancelled_within(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Wait for a task that somebody else cancels."""
    if int(sample.label) == 5:
        task = asyncio.create_task(asyncio.sleep(10))
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        await task
    return await answer(args, sample, sampling_params)


class Ending(Counting):
    """One that has 14 prompts."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return super().get_samples(min(num_samples, 14 - self.next))
