"""A process that scores samples for the `RewardPool`: one after the other, or many at once on an event loop.

    python -m fusionrl.rewards.worker DESCRIPTOR MEMFD sync|async LEVEL

Messages are pickles behind their length. In: (number, `PackedSettings`, call, pickled samples, kwargs and `Loan` of
their images). Out: first None, then (number, reward or `RewardRaised`, changed attributes of each sample). The process
ends with the connection. Its output, and its logs from LEVEL on, go to the Buffer's log; the shared memory MEMFD shows
which job runs (see `pool.STATE`).
"""

import asyncio
import contextvars
import ctypes
import inspect
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from fusionrl.base.process import answer_with_stacks
from fusionrl.base.sockets import frame, receive
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.observe.logs import setup_logging, write_whole_lines
from fusionrl.rewards.pool import STATE
from fusionrl.rewards.reward_call import PackedSettings, RewardRaised, call_reward, scorer_of

T = TypeVar("T")
BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
READY = frame(None)


class _Job:
    """One call: the samples, what they were like, and the answer."""

    def __init__(self, number: int, settings: PackedSettings, call: str, payload: bytes) -> None:
        self.number, self.call = number, call
        self._pickled = settings, payload
        self.path: str | None = None  # of the function, and the samples, once both are unpickled
        self.samples: list[Sample] = []

    def start(self) -> object:
        """Unpickle the call, which runs code of the user's classes, and make it; returns the reward or an awaitable."""
        settings = self._pickled[0].read()
        self.samples, kwargs, loan = pickle.loads(self._pickled[1])
        if loan is not None:
            IMAGES.borrow(loan)
        self._before = [_attributes(sample) for sample in self.samples]
        self.path = scorer_of(settings, self.samples[0]).path
        return call_reward(settings, self.samples if self.call == "group" else self.samples[0], **kwargs)

    def answer(self, reward: object) -> bytes:
        """Return the frame of the reward, with what the function changed in its samples.

        Pickling runs code of the user's classes, so this may raise anything, like the function.
        """
        changes = []
        for sample, before in zip(self.samples, self._before, strict=True):
            sample.pack()  # a list that the function only read is as it was
            after = _attributes(sample)
            changes.append({name: vars(sample)[name] for name in after if after[name] != before.get(name)})
        return frame((self.number, reward, changes))

    def failure(self, error: BaseException) -> bytes:
        return frame((self.number, RewardRaised.of(error, self.path, self.samples), []))


def _attributes(sample: Sample) -> dict[str, bytes]:
    """Return each attribute as a value that differs once it was changed; images stay what engines have seen."""
    return {name: pickle.dumps(value) for name, value in vars(sample).items() if not name.startswith("multimodal_")}


def serve_sync(connection: socket.socket, state: mmap.mmap) -> None:
    """Score one sample after the other."""
    connection.sendall(READY)
    while True:
        job = _Job(*receive(connection))
        state[8:16] = struct.pack("Q", job.number)
        try:
            reward = job.start()
            if inspect.isawaitable(reward):  # a plain function may return one, as a lambda or a partial does
                reward = asyncio.run(_awaited(reward))
            answer = job.answer(reward)
        except Exception as error:  # a user's function may raise anything; the pool reports it
            answer = job.failure(error)
        connection.sendall(answer)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def serve_async(connection: socket.socket, state: mmap.mmap) -> None:
    """Score all samples that are there at once, on one event loop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tasks, beats = set[asyncio.Task[bytes]](), [0]

    def beat() -> None:
        beats[0] += 1
        state[:8] = struct.pack("Q", beats[0])
        loop.call_later(BEAT_S, beat)

    async def run(job: _Job) -> bytes:
        reward = job.start()
        if inspect.isawaitable(reward):
            reward = await reward
        return job.answer(reward)

    def finish(job: _Job, task: asyncio.Task[bytes]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            error = task.exception()  # a user's function may raise anything; the pool reports it
            connection.sendall(task.result() if error is None else job.failure(error))

    def start(job: _Job) -> asyncio.Task[bytes]:
        job_number.set(job.number)
        return loop.create_task(run(job))

    def on_readable() -> None:
        try:
            job = _Job(*receive(connection))
        except (EOFError, OSError):
            loop.stop()
            return
        task = contextvars.Context().run(start, job)
        tasks.add(task)
        task.add_done_callback(partial(finish, job))

    job_number: contextvars.ContextVar[int] = contextvars.ContextVar("job_number", default=0)

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        # A task that a function starts inherits its context, which names its job.
        context = more.get("context")
        number = context.get(job_number, 0) if context is not None else job_number.get()
        return asyncio.Task(_marked(coroutine, state, number), loop=loop, **more)

    loop.set_task_factory(make_task)
    beat()
    connection.sendall(READY)
    loop.add_reader(connection.fileno(), on_readable)
    loop.run_forever()
    os._exit(0)  # tasks that still run are useless, and may refuse to end


async def _marked(coroutine: Coroutine[object, object, T], state: mmap.mmap, number: int) -> T:
    """Await `coroutine`, and say before and after each of its steps whose code runs."""
    job_number, none = struct.pack("Q", number), struct.pack("Q", 0)

    @types.coroutine
    def steps() -> Generator[object, object, T]:
        send: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            state[8:16] = job_number
            try:
                yielded = send(value)
            except StopIteration as end:
                return end.value
            finally:
                state[8:16] = none
            try:
                value, send = (yield yielded), coroutine.send
            except BaseException as error:  # asyncio throws into a coroutine; handed on as it came
                value, send = error, coroutine.throw

    return await steps()


def main(arguments: Sequence[str]) -> None:
    """Take the log level, secrets and connection over; score until the pool closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_whole_lines()
    answer_with_stacks()
    setup_logging(arguments[3], None, role="reward")
    # One that hangs would not notice that the pool is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(json.loads(sys.stdin.read() or "{}"))  # the secrets of the user's functions
    descriptor, memory, kind = int(arguments[0]), int(arguments[1]), arguments[2]
    with socket.socket(fileno=descriptor) as connection, mmap.mmap(memory, STATE.size) as state:
        try:
            if kind == "sync":
                serve_sync(connection, state)
            else:
                serve_async(connection, state)
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
