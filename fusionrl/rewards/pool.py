"""`RewardPool`: reward functions run in processes of their own, each sample under a time limit.

Plain functions run in a few processes, one sample at a time in each; `async` ones all together on the event loop of
one. A function that hangs, blocks its loop or takes its process down costs the sample that it was at, and nothing
else: the process is killed, and the other samples that it had are scored again in another.

One thread talks to all processes, on an event loop of its own: those of rollouts end with them.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fusionrl.base.environment import child_environment, secrets_of_hooks
from fusionrl.base.pipe_messages import LENGTH, frame
from fusionrl.data.sample import Sample
from fusionrl.observe.logs import LEVELS
from fusionrl.rewards.reward_call import LostReward, RewardRaised

# State of a process with an event loop, in shared memory: beats of the loop, number of the job whose code runs.
STATE = struct.Struct("QQ")
TICK_S = 0.05
# A process that has been at one sample for so long does not count any more: another does its share meanwhile.
SLOW_S = 0.5
# A loop without a beat for so long is blocked: its other samples are scored elsewhere meanwhile.
BLOCKED_S = 1.0
# A loop that is late by so much may be blocked: until that is known, no job on it counts as over its limit.
LATE_BEAT_S = 0.3
MAX_LOOPS = 4
FEW = 32  # samples that are scored again at once when one of many broke a process and left no trace
IDLE_S = 10.0
_BUFFER_BYTES = 1 << 20  # of answers that are read at once


@dataclass(eq=False)
class _Job:
    number: int
    samples: list[Sample]
    message: bytes
    limit_s: float
    future: Future[Any] = field(default_factory=Future)
    returned: asyncio.Event = field(default_factory=asyncio.Event)  # it is settled, or must be scored again
    since: float = 0.0  # when a process was given it
    # Most jobs of a loop that runs this one: an unknown job killed an earlier loop that it was on. None: no limit.
    company: int | None = None

    def settle(self, value: object = None, error: Exception | None = None) -> None:
        """End the caller's wait, if it has not given up."""
        with suppress(InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)
        self.returned.set()


class _Process:
    """One process of the pool, as the pool's thread sees it."""

    def __init__(self, kind: str) -> None:
        self.jobs: dict[int, _Job] = {}
        self.since = self._beat_at = time.monotonic()  # of its last work, and of the last beat of its loop
        self._beats = 0
        self._memory = os.memfd_create("fusionrl-reward")
        os.ftruncate(self._memory, STATE.size)
        self._state = mmap.mmap(self._memory, STATE.size)
        self.writer: asyncio.StreamWriter | None = None
        self.connection, theirs = socket.socketpair()
        level = logging.getLevelName(logging.getLogger().level)
        level = level if level in LEVELS else "WARNING"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fusionrl.rewards.worker", str(theirs.fileno()), str(self._memory), kind, level],
                pass_fds=[theirs.fileno(), self._memory],
                stdin=subprocess.PIPE,
                env=child_environment("reward-worker"),
            )
        assert self.process.stdin is not None
        # Not by its environment, which every process of this user can read.
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(secrets_of_hooks()).encode())

    async def wait_until_ready(self) -> asyncio.StreamReader:
        """Return the stream of its answers once it has started: that takes a while, and is not a sample's fault.

        Raises:
            ChildProcessError: it ended instead.
        """
        reader, self.writer = await asyncio.open_connection(sock=self.connection, limit=_BUFFER_BYTES)
        try:
            await receive(reader)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildProcessError("a reward process ended while it started; its log says why") from error
        self.since = self._beat_at = time.monotonic()
        return reader

    def give(self, job: _Job) -> None:
        """Hand it a job."""
        assert self.writer is not None
        job.since = self.since = time.monotonic()
        job.returned.clear()
        self.jobs[job.number] = job
        self.writer.write(job.message)

    def running(self) -> int:
        """Number of the job whose code a loop runs now, or ran when the process died; 0: none that it knows of."""
        return STATE.unpack_from(self._state)[1]

    def blocked_for(self, now: float) -> float:
        """Seconds since the last beat of its loop."""
        beats = STATE.unpack_from(self._state)[0]
        if beats != self._beats:
            self._beats, self._beat_at = beats, now
        return now - self._beat_at

    def end(self) -> None:
        """Kill it."""
        if self.writer is not None:
            self.writer.transport.abort()
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self._state.close()
        os.close(self._memory)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message of a process."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class RewardPool:
    """See the module. `num_processes` of them score plain functions, and one `async` ones; more while some hang."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []  # of plain functions, the one that worked last at the end
        self._loops: list[_Process] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(num_processes)
        self._choosing = asyncio.Lock()  # held by the job that looks for a loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(
        self,
        grading: bytes,
        samples: Sequence[Sample],
        *,
        call: str,
        kwargs: dict[str, object],
        limit_s: float,
        is_async: bool,
    ) -> Future[object]:
        """Score a sample, or a group in one call; its future has the reward, or `LostReward`, or raises `RewardRaised`.

        The function's changes to the samples are applied here before the future is done.

        Args:
            grading: a pickled `Grading`.
            samples: one, or the group.
            call: "sample" or "group".
            kwargs: further keyword arguments of the function.
            limit_s: seconds, from when the function begins.
            is_async: whether it runs on an event loop.
        """
        number = next(self._numbers)
        message = frame((number, grading, call, kwargs, pickle.dumps(list(samples))))
        job = _Job(number, list(samples), message, limit_s)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._loop.call_soon_threadsafe(self._begin, job, is_async)
        return job.future

    def close(self) -> None:
        """End all processes; what is not scored yet stays so."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -------------------------------------------------------------------------------- the pool's thread
    def _begin(self, job: _Job, is_async: bool) -> None:
        task = self._spawn(self._score(job, is_async))
        task.add_done_callback(lambda _: job.future.cancel())  # where it was ended without a reward

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in list(self._processes):
            self._end(process)

    async def _score(self, job: _Job, is_async: bool) -> None:
        try:
            await (self._score_on_a_loop(job) if is_async else self._score_alone(job))
        except OSError as error:
            job.settle(error=RewardRaised(f"no process for it: {error}"))

    async def _start(self, kind: str) -> _Process:
        process = _Process(kind)
        self._processes.add(process)
        try:
            reader = await process.wait_until_ready()
        except ChildProcessError:
            self._end(process)
            raise
        self._spawn(self._listen(process, reader))
        return process

    def _end(self, process: _Process) -> None:
        self._processes.discard(process)
        for processes in (self._idle, self._loops):
            if process in processes:
                processes.remove(process)
        process.end()

    async def _listen(self, process: _Process, reader: asyncio.StreamReader) -> None:
        """Settle jobs as their answers come, until the process ends."""
        try:
            while True:
                number, reward, changes = await receive(reader)
                self._answered(process, number, reward, changes)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if process in self._processes and not self._closed:
                self._died(process)

    def _answered(self, process: _Process, number: int, reward: object, changes: Sequence[dict[str, object]]) -> None:
        job = process.jobs.pop(number, None)
        process.since = time.monotonic()
        if job is None:
            return
        if isinstance(reward, RewardRaised):
            job.settle(error=reward)
            return
        if not job.future.done():
            for sample, changed in zip(job.samples, changes, strict=True):
                for name, new in changed.items():
                    setattr(sample, name, new)
        job.settle(reward)

    def _died(self, process: _Process) -> None:
        """A process ended by itself: who was it? The others that it had are scored again."""
        jobs, running = list(process.jobs.values()), process.running()
        self._end(process)
        guilty = [job for job in jobs if job.number == running] or (jobs if len(jobs) == 1 else [])
        if not guilty:  # a callback, or a thread of some function
            _separate(jobs)
        _lose(guilty, "crash")
        _score_again(job for job in jobs if job not in guilty)

    # -------------------------------------------------------------------------------- plain functions
    async def _score_alone(self, job: _Job) -> None:
        """Score in a process that has nothing else to do meanwhile."""
        async with self._places:  # for as long as it is not slow: then another process does the share of this one
            if job.future.done():
                return
            process = self._idle.pop() if self._idle else await self._start("sync")
            process.give(job)
            await _wait(job.returned, min(SLOW_S, job.limit_s))
        await _wait(job.returned, job.limit_s - SLOW_S)
        if not job.returned.is_set():
            _lose([job], "timeout")
            self._end(process)
        elif process in self._processes:
            self._idle.append(process)
            if len(self._idle) > self.num_processes:
                self._loop.call_later(IDLE_S, self._end_surplus)

    def _end_surplus(self) -> None:
        if len(self._idle) > self.num_processes:
            self._end(self._idle[0])

    # -------------------------------------------------------------------------------- async functions
    async def _score_on_a_loop(self, job: _Job) -> None:
        while not job.future.done():
            async with self._choosing:
                (await self._loop_for(job)).give(job)
            await job.returned.wait()

    async def _loop_for(self, job: _Job) -> _Process:
        """Wait for a loop that is not blocked and takes the job."""
        while True:
            now = time.monotonic()
            free = [process for process in self._loops if process.blocked_for(now) <= BLOCKED_S]
            if not free and len(self._loops) < MAX_LOOPS:
                process = await self._start("async")
                self._loops.append(process)
                self._spawn(self._watch(process))
                free = [process]
            if free and _has_room(free[0], job):
                return free[0]
            await asyncio.sleep(TICK_S)

    async def _watch(self, process: _Process) -> None:
        """Look at a loop again and again until it ends."""
        while process in self._loops:
            now = time.monotonic()
            blocked_s = process.blocked_for(now)
            if blocked_s > BLOCKED_S:
                self._blocked(process, blocked_s)
            elif not process.jobs:
                if len(self._loops) > 1 and now - process.since > IDLE_S:
                    self._end(process)
            elif blocked_s < LATE_BEAT_S:
                late = [job for job in process.jobs.values() if now - job.since > job.limit_s]
                for job in late:  # its task stays where it is: it waits, and takes nothing from the others
                    del process.jobs[job.number]
                _lose(late, "timeout")
            await asyncio.sleep(TICK_S)

    def _blocked(self, process: _Process, blocked_s: float) -> None:
        """Its loop is blocked by the job that runs; the others continue elsewhere, and the job's limit still holds."""
        guilty = process.jobs.get(process.running())
        innocent = [job for job in process.jobs.values() if job is not guilty]
        limit_s = guilty.limit_s if guilty else min((job.limit_s for job in innocent), default=0.0)
        if blocked_s > limit_s:
            self._end(process)
            if guilty is not None or len(innocent) == 1:
                _lose([guilty] if guilty else innocent, "timeout")
            else:
                _separate(innocent)
        elif guilty is None:
            return  # the job that blocks it is not known; the limit decides
        process.jobs = {} if guilty is None else {guilty.number: guilty}
        _score_again(innocent)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()


def _has_room(process: _Process, job: _Job) -> bool:
    bounds = [member.company for member in (job, *process.jobs.values()) if member.company is not None]
    return len(process.jobs) < min(bounds, default=len(process.jobs) + 1)


def _separate(jobs: Sequence[_Job]) -> None:
    """One of them broke its process: fewer shall be with it next time."""
    for job in jobs:
        job.company = 1 if job.company is not None or len(jobs) <= FEW else FEW


def _lose(jobs: Sequence[_Job], reason: str) -> None:
    for job in jobs:
        job.settle(LostReward(reason))


def _score_again(jobs: Iterable[_Job]) -> None:
    for job in jobs:
        job.returned.set()
