"""`RewardPool`: reward functions run in processes of their own, each sample under a time limit.

Plain functions run in a few processes, one sample at a time in each; `async` ones all together on the event loop of
one. A function that hangs, blocks its loop or takes its process down costs the sample that it was at, and nothing
else: the process is killed, and the other samples that it had are scored again in another.

One thread talks to all processes, on an event loop of its own: rollouts each have another one.
"""

import asyncio
import atexit
import itertools
import json
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fusionrl.base.environment import child_environment, secrets_of_hooks
from fusionrl.base.sockets import LENGTH, frame
from fusionrl.data.sample import Sample
from fusionrl.observe.logs import LEVELS
from fusionrl.rewards.reward_call import STATE, LostReward, RewardCall, RewardRaised

logger = logging.getLogger(__name__)

TICK_S = 0.05
# A process that has been at one sample for so long does not count any more: another does its share meanwhile.
SLOW_S = 0.5
CHUNK = 16  # samples that a process is handed at once, at most
# A loop without a beat for so long is blocked: its other samples are scored elsewhere meanwhile.
BLOCKED_S = 1.0
# A loop that is late by so much may be blocked: until that is known, no job on it counts as over its limit.
LATE_BEAT_S = 0.3
MAX_LOOPS = 4
FEW = 32  # samples that are scored again at once when one of many broke a process and left no trace
IDLE_S = 10.0
_START_S = 30.0  # for the system to have room for a process again
_MOST_UNREADY = 3  # processes in a row
_COMMAND = "import sys; from fusionrl.rewards.reward_call import main; main(sys.argv[1:])"


@dataclass
class _Job:
    number: int
    samples: Sequence[Sample]
    message: bytes
    limit_s: float
    is_async: bool
    future: Future[Any] = field(default_factory=Future)
    since: float = 0.0  # when a loop that is ready was given it; anew where it is given to another
    # Most jobs of a loop that runs this one: an unknown job killed an earlier loop that it was on. None: no limit.
    company: int | None = None

    def settle(self, value: object = None, error: Exception | None = None) -> None:
        """End the caller's wait, if it has not given up."""
        with suppress(InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)


class _Process(asyncio.Protocol):
    """One process of the pool, as the pool's thread sees it."""

    def __init__(self, kind: str, pool: "RewardPool") -> None:
        self.kind, self._pool = kind, pool
        self.jobs: dict[int, _Job] = {}
        self.since = time.monotonic()  # of the sample that a plain process is at; of the last work, when it has none
        self._memory = os.memfd_create("fusionrl-reward")
        os.ftruncate(self._memory, STATE.size)
        self._state = mmap.mmap(self._memory, STATE.size)
        self._beats, self.beat_at = 0, time.monotonic()
        self.is_ready = self.has_ended = False  # starting takes a while, and is not the sample's fault
        self._in = bytearray()
        self._transport: asyncio.Transport | None = None
        self.connecting: asyncio.Task[Any] | None = None
        level = logging.getLevelName(logging.getLogger().level)
        level = level if level in LEVELS else "WARNING"
        try:
            self.connection, theirs = socket.socketpair()
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(self._memory), kind, level],
                    pass_fds=[theirs.fileno(), self._memory],
                    stdin=subprocess.PIPE,
                    env=child_environment("reward-worker"),
                )
        except OSError:
            self._state.close()
            os.close(self._memory)
            raise
        assert self.process.stdin is not None
        # Not by its environment, which every process of this user can read.
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(secrets_of_hooks()).encode())

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.writelines(job.message for job in self.jobs.values())

    def data_received(self, data: bytes) -> None:
        self._in += data
        while len(self._in) >= LENGTH.size and not self.has_ended:
            (length,) = LENGTH.unpack_from(self._in)
            if len(self._in) < LENGTH.size + length:
                break
            answer = pickle.loads(self._in[LENGTH.size : LENGTH.size + length])
            del self._in[: LENGTH.size + length]
            self._take(answer)
        self._pool.work_soon()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.has_ended:
            self._pool.lost_process(self)

    def _take(self, answer: tuple[int, object, Sequence[dict[str, object]]] | None) -> None:
        """Take the message that the process is ready, or an answer to a job."""
        now = time.monotonic()
        self.since = now
        if answer is None:
            self.is_ready, self.beat_at = True, now
            self._pool.num_unready = 0
            for waiting in self.jobs.values():
                waiting.since = now
            return
        number, reward, changes = answer
        job = self.jobs.pop(number, None)
        if job is None or job.future.done():
            return
        if isinstance(reward, RewardRaised):
            job.settle(error=reward)
            return
        for sample, changed in zip(job.samples, changes, strict=True):
            for name, new in changed.items():
                setattr(sample, name, new)
        job.settle(reward)

    def give(self, jobs: Sequence[_Job]) -> None:
        """Hand it jobs; those before its connection is open are sent then."""
        for job in jobs:
            if not self.jobs:
                self.since = time.monotonic()
            self.jobs[job.number] = job
        if self._transport is not None:
            self._transport.writelines(job.message for job in jobs)

    def running(self) -> int:
        """Number of the job whose code a loop runs now, or ran when the process died; 0: none that it knows of."""
        return STATE.unpack_from(self._state)[1]

    def blocked_for(self, now: float) -> float:
        """Seconds since the last beat of its loop; 0 for a process that has not yet begun."""
        beats = STATE.unpack_from(self._state)[0]
        if beats != self._beats:
            self._beats, self.beat_at = beats, now
        return now - self.beat_at if self.is_ready else 0.0

    def end(self) -> None:
        self.has_ended = True
        if self._transport is not None:
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()
            self.connection.close()
        self.process.kill()
        self.process.wait()
        self._state.close()
        os.close(self._memory)


class RewardPool:
    """See the module. `num_processes` of them score plain functions, and one `async` ones; more while some hang."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._numbers = itertools.count(1)
        self._new: list[_Job] = []  # that the pool's thread has not taken yet
        self._plain: list[_Process] = []
        self._loops: list[_Process] = []
        self._waiting: deque[_Job] = deque()
        self._waiting_async: deque[_Job] = deque()
        self.num_unready = 0
        """Processes that ended as they started, since one was ready."""
        self._no_process_since: float | None = None  # that could be started
        self._not_before = 0.0  # no process is started, while others live
        self._closed, self._lock = False, threading.Lock()
        self._event_loop = asyncio.new_event_loop()
        self._next_work: asyncio.Handle = self._event_loop.call_later(1.0, self._work)
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, call: RewardCall, limit_s: float, is_async: bool) -> Future[object]:
        """Score a sample, or a group in one call; its future has the reward, or `LostReward`, or raises `RewardRaised`.

        The function's changes to the samples are applied here before the future is done.

        limit_s   seconds, from when the function begins
        is_async  whether it runs on an event loop
        """
        number = next(self._numbers)
        job = _Job(number, call.samples, frame((number, call.hooks, call.packed())), limit_s, is_async)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._new.append(job)
            if len(self._new) == 1:  # else its thread is woken already
                self._event_loop.call_soon_threadsafe(self._add)
        return job.future

    def close(self) -> None:
        """End all processes; what is not scored yet stays so."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        atexit.unregister(self.close)
        self._thread.join(10)

    # -------------------------------------------------------------------------------- the pool's thread
    def _serve(self) -> None:
        self._event_loop.run_forever()
        self._next_work.cancel()  # it would look at processes that have ended
        for process in (*self._plain, *self._loops):
            process.end()
            self._waiting.extend(process.jobs.values())
        for job in (*self._waiting, *self._waiting_async, *self._new):
            job.future.cancel()
        self._event_loop.run_until_complete(asyncio.sleep(0))  # transports close
        self._event_loop.close()

    def _add(self) -> None:
        with self._lock:
            jobs, self._new = self._new, []
        for job in jobs:
            (self._waiting_async if job.is_async else self._waiting).append(job)
        self.work_soon()

    def work_soon(self) -> None:
        """Look at all jobs once the messages that have arrived are read."""
        self._next_work.cancel()
        self._next_work = self._event_loop.call_soon(self._work)

    def _work(self) -> None:
        now = time.monotonic()
        self._run_plain(now)
        self._run_async(now)
        is_busy = self._waiting or self._waiting_async or any(p.jobs for p in (*self._plain, *self._loops))
        self._next_work = self._event_loop.call_later(TICK_S if is_busy else 1.0, self._work)

    def _start(self, kind: str) -> _Process | None:
        """Start a process; None where the system has none to give, which is tried again for a while."""
        processes, now = self._loops if kind == "async" else self._plain, time.monotonic()
        if processes and now < self._not_before:
            return None
        try:
            process = _Process(kind, self)
        except OSError as error:
            if self._no_process_since is None:
                self._no_process_since = now
                logger.warning("a process for rewards could not be started: %s", error)
            if not processes and now - self._no_process_since > _START_S:
                self._give_up(kind, error)
            return None
        self._no_process_since = None
        processes.append(process)
        connecting = self._event_loop.create_connection(lambda: process, sock=process.connection)
        process.connecting = self._event_loop.create_task(connecting)
        return process

    def _give_up(self, kind: str, error: Exception) -> None:
        """No process can score what waits: raise `error` for each."""
        waiting = self._waiting_async if kind == "async" else self._waiting
        for job in waiting:
            job.settle(error=error)
        waiting.clear()

    def lost_process(self, process: _Process) -> None:
        """A process ended by itself: who was it? The others that it had are scored again."""
        if not process.is_ready:  # it has called no function
            self._remove(process)
            self.num_unready += 1
            if self.num_unready >= _MOST_UNREADY:
                self.num_unready, self._not_before = 0, time.monotonic() + _START_S
                ended = f"{_MOST_UNREADY} processes for rewards in a row ended as they started"
                error = RuntimeError(f"{ended} (exit status {process.process.returncode}): see the Buffer's log")
                logger.warning("%s", error)
                if not (self._loops if process.kind == "async" else self._plain):
                    self._give_up(process.kind, error)
            self.work_soon()
            return
        jobs = [job for job in process.jobs.values() if not job.future.done()]
        number = process.running()
        guilty = [job for job in jobs if job.number == number]
        if process.kind == "async" and not guilty:  # a callback, or a thread of some function
            if len(jobs) == 1:
                guilty = jobs
            else:
                _separate(jobs)
        self._remove(process)
        self._lose(guilty, "crash")
        self.work_soon()

    def _lose(self, jobs: Sequence[_Job], reason: str) -> None:
        for job in jobs:
            job.settle(LostReward(reason))

    def _remove(self, process: _Process) -> None:
        """End a process; what it had and is not done waits again, in front."""
        process.end()
        processes, waiting = (
            (self._loops, self._waiting_async) if process.kind == "async" else (self._plain, self._waiting)
        )
        processes.remove(process)
        waiting.extendleft(reversed([job for job in process.jobs.values() if not job.future.done()]))
        process.jobs = {}

    def _run_plain(self, now: float) -> None:
        for process in list(self._plain):
            running = process.running()
            for number in [n for n, job in process.jobs.items() if job.future.done() and n != running]:
                del process.jobs[number]  # scored elsewhere meanwhile
            current = process.jobs.get(running) or next(iter(process.jobs.values()), None)
            if current is None:
                if len(self._plain) > self.num_processes and now - process.since > IDLE_S:
                    self._remove(process)
            elif process.is_ready and now - process.since > current.limit_s:
                self._lose([current], "timeout")
                self._remove(process)
        quick = [p for p in self._plain if not (p.jobs and p.is_ready) or now - p.since < SLOW_S]
        for process in self._plain:
            if process not in quick and len(process.jobs) > 1:
                # What waits behind a slow one goes to others; should it get there first, the second answer is ignored.
                running = process.running()
                behind = [job for number, job in process.jobs.items() if number != running]
                known = set(map(id, self._waiting))
                busy = {number for quick_process in quick for number in quick_process.jobs}
                self._waiting.extendleft(j for j in reversed(behind) if id(j) not in known and j.number not in busy)
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        if not self._waiting:
            return
        num_wanted = min(self.num_processes, len(self._waiting) + sum(bool(p.jobs) for p in quick))
        for _ in range(num_wanted - len(quick)):
            if (started := self._start("sync")) is None:
                break
            quick.append(started)
        chunk = max(1, min(CHUNK, len(self._waiting) // (2 * self.num_processes)))
        for process in quick:
            while self._waiting and not process.jobs:
                taken = [self._waiting.popleft() for _ in range(min(chunk, len(self._waiting)))]
                process.give([job for job in taken if not job.future.done()])

    def _run_async(self, now: float) -> None:
        for process in list(self._loops):
            blocked = process.blocked_for(now)
            for number in [n for n, job in process.jobs.items() if job.future.done() and n != process.running()]:
                del process.jobs[number]
            if blocked > BLOCKED_S:
                self._blocked(process, blocked)
                continue
            if blocked < LATE_BEAT_S:
                late = [job for job in process.jobs.values() if job.since and now - job.since > job.limit_s]
                self._lose(late, "timeout")  # its task stays where it is: it waits, and takes nothing from the others
            if not process.jobs and len(self._loops) > 1 and now - process.since > IDLE_S:
                self._remove(process)
        while self._waiting_async and self._waiting_async[0].future.done():
            self._waiting_async.popleft()
        free = [p for p in self._loops if p.blocked_for(now) <= BLOCKED_S]
        if self._waiting_async and not free and len(self._loops) < MAX_LOOPS:
            free = [started] if (started := self._start("async")) is not None else []
        if not free:
            return
        process, taken = free[0], list[_Job]()
        while self._waiting_async:
            job, running = self._waiting_async[0], [*process.jobs.values(), *taken]
            companies = [member.company for member in (job, *running) if member.company is not None]
            if len(running) >= min(companies, default=len(running) + 1):
                break
            self._waiting_async.popleft()
            if not job.future.done():
                job.since = now if process.is_ready else 0.0
                taken.append(job)
        process.give(taken)

    def _blocked(self, process: _Process, blocked_s: float) -> None:
        """Its loop is blocked by the job that runs; the others continue elsewhere, and the job's limit still holds."""
        guilty = process.jobs.get(process.running())
        limit_s = guilty.limit_s if guilty else min((job.limit_s for job in process.jobs.values()), default=0.0)
        innocent = [job for job in process.jobs.values() if job is not guilty and not job.future.done()]
        if blocked_s > limit_s:
            if guilty is None:
                _separate(innocent)
            self._lose([guilty] if guilty else innocent if len(innocent) == 1 else [], "timeout")
            self._remove(process)
        elif guilty is not None:
            for job in innocent:
                del process.jobs[job.number]
            self._waiting_async.extendleft(reversed(innocent))


def _separate(jobs: Sequence[_Job]) -> None:
    """One of them broke its process: fewer shall be with it next time."""
    for job in jobs:
        job.company = 1 if job.company is not None or len(jobs) <= FEW else FEW
