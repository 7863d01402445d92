"""Rollout functions of a user's for tests of the stream: they make whole batches, in the ways that are known."""

import asyncio
import contextlib
import queue
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fusionrl.config.hooks import load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout.types import RolloutAborted, RolloutFnTrainOutput

_FILE = Path(__file__).with_name("stream_hooks.py")
answer, odd_prompts = (load_function(f"{_FILE}:{name}") for name in ("answer", "odd_prompts"))  # as the tests have them

DRAWN: list[int] = []  # labels, in the order in which they were drawn
CALLS: list[int] = []  # rollouts
MAY_ANSWER = threading.Event()  # a test clears it until the trainers wait
MAY_ANSWER.set()


def _noted(groups: list[list[Sample]]) -> list[list[Sample]]:
    DRAWN.extend(int(group[0].label) for group in groups)
    return groups


async def _group(args: Namespace, group: list[Sample], slow_s: float = 0.3) -> list[Sample]:
    return list(await asyncio.gather(*(answer(args, sample, {"slow_s": slow_s}) for sample in group)))


# Of those that wait for their slow prompts one after the other: no prompt has to be slow beside others that are not.
_IN_TURN_S = 0.1


def whole_batches(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    CALLS.append(rollout_id)
    MAY_ANSWER.wait(30)

    async def make() -> list[list[Sample]]:
        groups = _noted(data_source.get_samples(args.rollout_batch_size))
        return list(await asyncio.gather(*(_group(args, group, _IN_TURN_S) for group in groups)))

    return asyncio.run(make())


def filtering(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Keep the groups of odd prompts; draw until there are enough, within the event loop."""

    async def make() -> list[list[Sample]]:
        kept: list[list[Sample]] = []
        waiting: set[asyncio.Task[list[Sample]]] = set()
        while len(kept) < args.rollout_batch_size:
            while len(kept) + len(waiting) < args.rollout_batch_size:
                for group in _noted(data_source.get_samples(args.rollout_batch_size)):
                    waiting.add(asyncio.create_task(_group(args, group)))
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if odd_prompts(args, task.result()):
                    kept.append(task.result())
        for task in waiting:
            task.cancel()
        return kept[: args.rollout_batch_size]

    return RolloutFnTrainOutput(asyncio.run(make()), {"rollout/mine": 1.0})


def filtering_in_turn(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The same without an event loop around it."""
    kept: list[list[Sample]] = []
    while len(kept) < args.rollout_batch_size:
        for group in _noted(data_source.get_samples(1)):
            made = asyncio.run(_group(args, group, _IN_TURN_S))
            if odd_prompts(args, made):
                kept.append(made)
    return kept


class Worker:
    """Keeps a pool of groups under way in a thread and an event loop of its own; finished ones wait in a queue."""

    def __init__(self, args: Namespace, data_source: Any, size: int) -> None:
        self.args, self.data_source, self.size = args, data_source, size
        self.finished: queue.Queue[list[Sample]] = queue.Queue()
        self.ends = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)
        self.thread.start()

    async def _work(self) -> None:
        under_way: set[asyncio.Task[None]] = set()
        while not self.ends.is_set():
            while len(under_way) < self.size:
                try:
                    groups = _noted(self.data_source.get_samples(1))
                except RolloutAborted:  # the run ends
                    self.ends.set()
                    break
                if not groups:
                    break
                under_way |= {asyncio.create_task(self._one(group)) for group in groups}
            await asyncio.sleep(0.01)
            under_way = {task for task in under_way if not task.done()}
        for task in under_way:
            task.cancel()

    async def _one(self, group: list[Sample]) -> None:
        self.finished.put(await _group(self.args, group))


WORKER: list[Worker] = []


def fully_asynchronous(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the first groups that are finished, whichever they are; the others go on."""
    CALLS.append(rollout_id)
    groups = one_by_one(args, rollout_id, data_source)
    while len(groups) < args.rollout_batch_size and not args.abort_event.is_set():
        groups += one_by_one(args, rollout_id, data_source)
    return groups


def one_by_one(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    if not WORKER:
        WORKER.append(Worker(args, data_source, 64))
    while not args.abort_event.is_set():
        with contextlib.suppress(queue.Empty):
            return [WORKER[0].finished.get(timeout=0.05)]
    return []


def partial(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Draw twice what is wanted, and hand the other half back with a part of an answer each."""
    groups = _noted(data_source.get_samples(2 * args.rollout_batch_size))
    made = [asyncio.run(_group(args, group, _IN_TURN_S)) for group in groups]
    for group in made[args.rollout_batch_size :]:
        for sample in group:
            sample.status = Sample.Status.ABORTED
    data_source.add_samples(made[args.rollout_batch_size :])
    return made[: args.rollout_batch_size]


def loses_one(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = whole_batches(args, rollout_id, data_source)
    if not LOST:
        LOST.append(groups.pop())
    return groups


loses_one.keeps_groups = True  # type: ignore[attr-defined]
LOST: list[Any] = []


def raises(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    if rollout_id == 1:
        raise KeyError("no such batch")
    return whole_batches(args, rollout_id, data_source)


def from_elsewhere(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make groups of prompts of one's own; the first sample of each has failed."""
    numbers = range(100 + 4 * rollout_id, 104 + 4 * rollout_id)
    groups = [[Sample(index=2 * n + k, prompt=f"p{n}", label=str(n)) for k in range(2)] for n in numbers]
    made = [asyncio.run(_group(args, group, _IN_TURN_S)) for group in groups]
    for group in made:
        group[0].status = Sample.Status.FAILED
    return made


def stale(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make groups of one's own whose tokens are of the first weights, always."""
    groups = from_elsewhere(args, rollout_id, data_source)
    for sample in (sample for group in groups for sample in group):
        sample.weight_versions = [0] * sample.response_length
    return groups


def nothing(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return []


def polite(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Keep the groups of odd prompts; where there is no prompt, wait a little and ask again."""

    async def make() -> list[list[Sample]]:
        kept: list[list[Sample]] = []
        while len(kept) < args.rollout_batch_size:
            groups = _noted(data_source.get_samples(args.rollout_batch_size))
            if not groups:
                await asyncio.sleep(0.05)
            for group in groups:
                made = await _group(args, group, _IN_TURN_S)
                if odd_prompts(args, made):
                    kept.append(made)
            del groups
        return kept[: args.rollout_batch_size]

    return asyncio.run(make())


def late(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the first group of all after it was given up."""
    groups = whole_batches(args, rollout_id, data_source)
    if not LOST:
        LOST.append(groups.pop())
    elif len(LOST) == 1 and rollout_id >= 4:
        groups.append(LOST[0])
        LOST.append(None)
    return groups


late.keeps_groups = True  # type: ignore[attr-defined]


def keeps_one(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Keep a group from one call to the next, twice, and do not say so."""
    groups = whole_batches(args, rollout_id, data_source)
    if len(LOST) < 2 and groups:
        before = LOST[-1:]
        LOST.append(groups.pop())
        return [*before, *groups]
    if len(LOST) == 2:
        groups.append(LOST[1])
        LOST.append(None)
    return groups


def filtering_in_pool(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The same in a thread of a pool that ends with the call."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(filtering, args, rollout_id, data_source).result()


def keeps_unscored(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return groups without rewards, all of them at once."""
    groups = whole_batches(args, rollout_id, data_source)
    for sample in (sample for group in groups for sample in group):
        sample.reward = None
    return groups


def ends_early(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Keep one group for ever, and return none from the fourth rollout on."""
    return loses_one(args, rollout_id, data_source) if rollout_id < 3 else []


keeps_unscored.keeps_groups = ends_early.keeps_groups = True  # type: ignore[attr-defined]


def asks_for_more(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Draw a batch, ask for another one until there is something, and note how many groups came."""

    async def make() -> list[list[Sample]]:
        groups = data_source.get_samples(args.rollout_batch_size)
        while not LOST:
            if more := data_source.get_samples(args.rollout_batch_size):
                LOST.append(len(more))
            await asyncio.sleep(0.02)
        return [await _group(args, group, _IN_TURN_S) for group in groups]

    return asyncio.run(make())


def own_numbers(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Draw a batch and return new groups, numbered from 0; the first call returns fewer."""
    CALLS.append(rollout_id)
    if len(CALLS) == 1:
        data_source.get_samples(args.rollout_batch_size)
    numbers = range(args.rollout_batch_size - (len(CALLS) == 1))
    groups = [[Sample(group_index=n, index=2 * n + k, prompt=f"p{n}", label=str(n)) for k in range(2)] for n in numbers]
    return [asyncio.run(_group(args, group, _IN_TURN_S)) for group in groups]
