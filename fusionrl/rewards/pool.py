"""`RewardPool`: reward functions run in processes of their own, each sample under a time limit.

Plain functions run in a few processes, one sample at a time in each; `async` ones all together on the event loop of
one. A function that hangs, blocks its loop or takes its process down costs the sample that it was at, and nothing
else: the process is killed, and the other samples that it had are scored again in another.

One thread talks to all processes. It is not bound to an event loop: rollouts each have one of their own.
"""

import atexit
import itertools
import json
import logging
import mmap
import os
import pickle
import selectors
import socket
import struct
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
from fusionrl.data.sample_images import loan_of
from fusionrl.observe.logs import LEVELS
from fusionrl.rewards.reward_call import LostReward, PackedSettings, RewardRaised

# State of a process, in shared memory: beats of its event loop, number of the job whose code runs.
STATE = struct.Struct("QQ")
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
_MOST_PARTS = 64  # of one message to the system


@dataclass
class _Job:
    number: int
    samples: list[Sample]
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


class _Process:
    """One process of the pool, as the pool's thread sees it."""

    def __init__(self, kind: str, selector: selectors.BaseSelector) -> None:
        self.kind = kind
        self.jobs: dict[int, _Job] = {}
        self.since = time.monotonic()  # of the sample that a plain process is at; of the last work, when it has none
        self._memory = os.memfd_create("fusionrl-reward")
        os.ftruncate(self._memory, STATE.size)
        self._state = mmap.mmap(self._memory, STATE.size)
        self._beats, self.beat_at = 0, time.monotonic()
        self.is_ready = False  # starting takes a while, and is not the sample's fault
        self._out: deque[bytes | memoryview] = deque()
        self._events = selectors.EVENT_READ
        self._in = bytearray()
        self._selector = selector
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
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
        selector.register(self.connection, self._events, self)

    def give(self, jobs: Sequence[_Job]) -> None:
        """Hand it jobs; sent when it reads."""
        for job in jobs:
            self._out.append(job.message)
            if not self.jobs:
                self.since = time.monotonic()
            self.jobs[job.number] = job
        self.flush()

    def flush(self) -> None:
        """Send what it takes now; the rest when it reads again."""
        try:
            while self._out:
                parts = list(itertools.islice(self._out, _MOST_PARTS))
                sent = self.connection.sendmsg(parts)
                while sent:
                    part = self._out.popleft()
                    if sent < len(part):
                        self._out.appendleft(memoryview(part)[sent:])
                    sent -= min(sent, len(part))
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # it is gone; reading will tell
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self.connection, events, self)

    def read(self) -> tuple[list[Any], bool]:
        """(answers that have come, whether the process is gone)."""
        gone = False
        try:
            while True:
                data = self.connection.recv(1 << 20)
                if not data:
                    gone = True
                    break
                self._in += data
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        answers = []
        while len(self._in) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in)
            if len(self._in) < LENGTH.size + length:
                break
            answers.append(pickle.loads(self._in[LENGTH.size : LENGTH.size + length]))
            del self._in[: LENGTH.size + length]
        return answers, gone

    def running(self) -> int:
        """Number of the job whose code a loop runs now, or ran when the process died; 0: none that it knows of."""
        return STATE.unpack_from(self._state)[1]

    def blocked_for(self, now: float) -> float:
        """Seconds since the last beat of its loop; 0 for a process that has not yet begun."""
        beats = STATE.unpack_from(self._state)[0]
        if beats != self._beats:
            self._beats, self.beat_at = beats, now
        return now - self.beat_at if self.is_ready else 0.0

    def ready(self, now: float) -> None:
        """It says that it has started: time counts from now on."""
        self.is_ready, self.since, self.beat_at = True, now, now
        for job in self.jobs.values():
            job.since = now

    def end(self) -> None:
        self._selector.unregister(self.connection)
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
        self._new: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._plain: list[_Process] = []
        self._loops: list[_Process] = []
        self._waiting: deque[_Job] = deque()
        self._waiting_async: deque[_Job] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(
        self,
        settings: PackedSettings,
        samples: Sequence[Sample],
        *,
        call: str,
        kwargs: dict[str, object],
        limit_s: float,
        is_async: bool,
    ) -> Future[object]:
        """Score a sample, or a group in one call; its future has the reward, or `LostReward`, or raises `RewardRaised`.

        The function's changes to the samples are applied here before the future is done.

        settings  what `RewardSettings.packed` returns
        samples   one, or the group
        call      "sample" or "group"
        kwargs    further keyword arguments of the function
        limit_s   seconds, from when the function begins
        is_async  whether it runs on an event loop
        """
        number = next(self._numbers)
        message = frame((number, settings, call, pickle.dumps((list(samples), kwargs, loan_of(samples)))))
        job = _Job(number, list(samples), message, limit_s, is_async)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            is_asleep = not self._new  # else it was woken by the one before, which it has not taken yet
            self._new.append(job)
        if is_asleep:
            self._wake_up.send(b"x")
        return job.future

    def close(self) -> None:
        """End all processes; what is not scored yet stays so."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._wake_up.send(b"x")
        self._thread.join(10)

    # -------------------------------------------------------------------------------- the pool's thread
    def _serve(self) -> None:
        while not self._closed:
            busy = self._waiting or self._waiting_async or any(p.jobs for p in (*self._plain, *self._loops))
            for key, events in self._selector.select(TICK_S if busy else 1.0):
                if key.data is None:
                    while self._drain():
                        pass
                    continue
                process: _Process = key.data
                if events & selectors.EVENT_WRITE:
                    process.flush()
                if events & selectors.EVENT_READ:
                    self._hear(process)
            with self._lock:
                while self._new:
                    job = self._new.popleft()
                    (self._waiting_async if job.is_async else self._waiting).append(job)
            now = time.monotonic()
            self._run_plain(now)
            self._run_async(now)
        for process in (*self._plain, *self._loops):
            process.end()
            self._waiting.extend(process.jobs.values())
        for job in (*self._waiting, *self._waiting_async, *self._new):
            job.future.cancel()
        self._selector.close()
        self._wake_up.close()
        self._woken.close()

    def _drain(self) -> bool:
        try:
            return bool(self._woken.recv(1 << 16))
        except BlockingIOError:
            return False

    def _hear(self, process: _Process) -> None:
        answers, gone = process.read()
        for answer in answers:
            if answer is None:
                process.ready(time.monotonic())
                continue
            number, reward, changes = answer
            job = process.jobs.pop(number, None)
            process.since = time.monotonic()
            if job is None or job.future.done():
                continue
            if isinstance(reward, RewardRaised):
                job.settle(error=reward)
                continue
            for sample, changed in zip(job.samples, changes, strict=True):
                for name, new in changed.items():
                    setattr(sample, name, new)
            job.settle(reward)
        if gone:
            self._died(process)

    def _died(self, process: _Process) -> None:
        """A process ended by itself: who was it? The others that it had are scored again."""
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
            process = _Process("sync", self._selector)
            self._plain.append(process)
            quick.append(process)
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
            self._loops.append(_Process("async", self._selector))
            free = self._loops[-1:]
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
