"""Functions for whole batches as slime's users write them, with slime's imports, written from a description.

`generate_rollout` makes one batch and waits for all of it. `generate_rollout_continuously` takes finished groups from a
worker: a thread with an event loop that asks for one group at a time, keeps a pool of tasks, and puts what is finished
into a queue. Neither knows of versions, staleness or admission.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.types import Sample

_worker: Worker | None = None


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Take the batch's prompts at once, answer them all, and return the groups in the order of their prompts."""
    assert not evaluation
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput(samples=asyncio.run(_answer(args, groups)), metrics={"rollout/batches": 1.0})


async def _answer(args: Namespace, groups: list[list[Sample]]) -> list[Any]:
    state = GenerateState(args)
    return await asyncio.gather(
        *(generate_and_rm_group(args, group, state.sampling_params.copy(), evaluation=False) for group in groups)
    )


class Worker:
    """Groups are under way all the time, as many as `pool_size`."""

    def __init__(self, args: Namespace, data_source: Any, pool_size: int) -> None:
        self.args, self.data_source, self.pool_size = args, data_source, pool_size
        self.finished: queue.Queue[list[Sample]] = queue.Queue()
        self.failure: BaseException | None = None
        self.running = True
        self.thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._loop())
        except BaseException as error:
            self.failure = error

    async def _loop(self) -> None:
        state = GenerateState(self.args)
        tasks: dict[asyncio.Task[Any], list[Sample]] = {}  # with the group as it came
        while self.running:
            for task in [task for task in tasks if task.done()]:
                self._keep(task.result(), tasks.pop(task))
            while len(tasks) < self.pool_size:
                groups = self.data_source.get_samples(1)
                if not groups:
                    break
                for group in groups:
                    blank = copy.deepcopy(group)
                    made = generate_and_rm_group(self.args, group, state.sampling_params.copy(), evaluation=False)
                    tasks[asyncio.create_task(made)] = blank
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()

    def _keep(self, group: list[Sample], blank: list[Sample]) -> None:
        if any(sample.status == Sample.Status.ABORTED for sample in group):
            self.data_source.add_samples([blank])  # from the beginning
        else:
            self.finished.put(group)


def generate_rollout_continuously(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the first groups that the worker has finished, as many as a batch has, sorted by their number."""
    assert not evaluation
    global _worker
    if _worker is None or not _worker.thread.is_alive():
        if _worker is not None and _worker.failure is not None:
            raise RuntimeError("the worker has ended") from _worker.failure
        _worker = Worker(args, data_source, pool_size=max(1, args.rollout_batch_size))
    groups: list[list[Sample]] = []
    waited = time.monotonic()
    while len(groups) < args.rollout_batch_size:
        try:
            groups.append(_worker.finished.get(timeout=0.1))
            waited = time.monotonic()
        except queue.Empty:
            if _worker.failure is not None:
                raise RuntimeError("the worker has ended") from _worker.failure
            if time.monotonic() - waited > 120.0:
                raise TimeoutError("no group was finished for two minutes") from None
    return sorted(groups, key=lambda group: group[0].index)
