"""Names of `slime.rollout.fully_async_rollout`: groups stay under way from one rollout to the next.

One worker for the process holds a pool of groups in flight. A rollout takes the first that are finished, and fills the
pool up; the others continue while the trainers train, also across a weight push. Prompts are drawn only during a
rollout call, so the data cursor does not move while a checkpoint is written. With --pipeline on-policy, nothing
bounds how old a sample may become; with the others the data source gives prompts only as --max-staleness allows.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import queue
from argparse import Namespace
from collections.abc import Sequence

from fusionrl.data.sample import Sample
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.event_loop import process_loop
from fusionrl.rollout.generate import as_list
from fusionrl.rollout.generate_state import request_limit, sampling_params
from fusionrl.rollout.types import DataSource, RolloutAborted, keeping_draws

logger = logging.getLogger(__name__)

Group = Sequence[Sample | list[Sample]]
_POLL_S = 0.1
_UNFINISHED = (Sample.Status.ABORTED, Sample.Status.PENDING)  # pending: `abort` was called before it began
_worker: AsyncRolloutWorker | None = None


class AsyncRolloutWorker:
    """Groups in flight on the process's event loop, and those that are finished.

    args         of the current rollout; the caller that starts a rollout sets them
    concurrency  most groups in flight, and most finished ones that wait, before no more prompts are drawn
    """

    def __init__(self, args: Namespace, data_buffer: DataSource, concurrency: int = 10) -> None:
        self.args, self.data_buffer, self.concurrency = args, data_buffer, concurrency
        self.running = False
        self.output_queue: queue.Queue[tuple[int, Group]] = queue.Queue()
        self._flying: dict[asyncio.Task[Group], list[Sample]] = {}
        self._aborted: queue.SimpleQueue[list[Sample]] = queue.SimpleQueue()  # filled by the loop's thread
        self._failure: BaseException | None = None
        self._num_begun = 0

    def start(self) -> None:
        """Let `fill` begin groups."""
        self.running = True

    def stop(self) -> None:
        """Cancel what is in flight."""
        self.running = False
        process_loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in self._flying:
            task.cancel()

    def fill(self) -> None:
        """Begin groups until the pool is full; those that an engine aborted come first.

        Raises:
            Exception: what a group raised since the last call.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        aborted = []
        while not self._aborted.empty():
            aborted.append(self._aborted.get())
        if aborted:
            self.data_buffer.add_samples(aborted)
        room = self.concurrency - max(len(self._flying), self.queue_size())
        if self.running and room > 0:
            with keeping_draws():
                groups = self.data_buffer.get_samples(room)
            asyncio.run_coroutine_threadsafe(self._begin(self.args, groups), process_loop()).result()

    async def _begin(self, args: Namespace, groups: list[list[Sample]]) -> None:
        for group in groups:
            blank, number = copy.deepcopy(group), self._num_begun
            coroutine = sglang_rollout.generate_and_rm_group(args, group, sampling_params(args))
            task = asyncio.create_task(coroutine)
            self._num_begun += 1
            self._flying[task] = blank
            task.add_done_callback(functools.partial(self._finish, number))

    def _finish(self, number: int, task: asyncio.Task[Group]) -> None:
        """Keep what a task made: for the queue, or to be begun again."""
        blank = self._flying.pop(task)
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._failure = failure
        elif any(sample.status in _UNFINISHED for item in task.result() for sample in as_list(item)):
            self._aborted.put(blank)
        else:
            self.output_queue.put((number, task.result()))

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, Group]]:
        """Take at most `limit` finished groups, each with its number."""
        taken: list[tuple[int, Group]] = []
        while (limit is None or len(taken) < limit) and not self.output_queue.empty():
            taken.append(self.output_queue.get_nowait())
        return taken

    def queue_size(self) -> int:
        """Return the number of finished groups that wait."""
        return self.output_queue.qsize()


def generate_rollout_fully_async(
    args: Namespace, rollout_id: int, data_buffer: DataSource, evaluation: bool = False
) -> list[Group]:
    """Return the first --rollout-batch-size groups that are finished; the others continue.

    Raises:
        ValueError: an evaluation, for which --eval-function-path names another function.
        RolloutAborted: the run is stopping.
    """
    if evaluation:
        raise ValueError(
            "generate_rollout_fully_async does not evaluate; give --eval-function-path"
            " fusionrl.rollout.sglang_rollout.generate_rollout"
        )
    worker = _process_worker(args, data_buffer)
    groups: list[tuple[int, Group]] = []
    while len(groups) < args.rollout_batch_size:
        if args.abort_event.wait(0 if worker.queue_size() else _POLL_S):
            worker.stop()
            raise RolloutAborted("the rollout was aborted")
        worker.fill()
        groups += worker.get_completed_groups(args.rollout_batch_size - len(groups))
    logger.info("rollout %d: %d finished groups wait", rollout_id, worker.queue_size())
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


generate_rollout_fully_async.keeps_groups = True  # type: ignore[attr-defined]  # in flight and finished


def _process_worker(args: Namespace, data_buffer: DataSource) -> AsyncRolloutWorker:
    global _worker
    if _worker is None or not _worker.running or _worker.data_buffer is not data_buffer:
        _worker = AsyncRolloutWorker(
            args, data_buffer, max(1, request_limit(args) // max(1, args.n_samples_per_prompt))
        )
        _worker.start()
    _worker.args = args
    return _worker
