"""One call of a reward, and the processes of the `RewardPool` that make such calls.

`dispatch` describes a call, `pool` sends it, and `serve_sync` or `serve_async` makes it: one after the other, or many
at once on an event loop. Messages are pickles behind their length. In: (number, hooks, `RewardCall.packed`). Out: first
None, then (number, reward or `RewardRaised`, changed attributes of each sample). A process ends with its connection.
Its output and its logs go to the Buffer's log; shared memory shows which call runs (`STATE`).
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import importlib
import inspect
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
import types
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from fusionrl.base.process import answer_with_stacks
from fusionrl.base.sockets import frame, receive
from fusionrl.config.hooks import load_function, register_hooks
from fusionrl.config.user_code import blamed_samples, user_frames
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import loan_of
from fusionrl.observe.logs import setup_logging, write_whole_lines
from fusionrl.rewards.registry import grade, runs_programs

T = TypeVar("T")
# State of a process, in shared memory: beats of its event loop, number of the call whose code runs.
STATE = struct.Struct("QQ")
BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READY = frame(None)
_IMMUTABLE = (str, int, float, bool, type(None))


class Scorer(NamedTuple):
    """What scores a sample: the function of `path`, a user's or the one that asks a server; None: `rm_type` does."""

    path: str | None
    rm_type: str  # "": none
    name: str  # for messages


@dataclass
class RewardCall:
    """A call of a reward function for a sample, or with --group-rm for a group.

    args    of a user's function; None for a built-in reward
    kwargs  of the function; for a built-in reward `model_score`, if a reward model has scored the sample
    hooks   field → functions of that flag: samples may hold objects of classes in their files
    """

    scorer: Scorer
    samples: Sequence[Sample]
    args: Namespace | None = None
    kwargs: dict[str, object] = field(default_factory=dict)
    is_group: bool = False
    format_regex: str | None = None
    allow_weak_sandbox: bool = False
    hooks: dict[str, object] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return the pickle of the call and a `Loan` of its images; values of `args` that no pickle takes are left
        out."""
        loan, call = loan_of(self.samples), replace(self, hooks={})
        if (pickled := _pickled((call, loan))) is not None:
            return pickled
        args = Namespace()
        values = vars(self.args or args).items()
        vars(args).update((name, value) for name, value in values if _pickled(value) is not None)
        return pickle.dumps((replace(call, args=args), loan))

    @classmethod
    def unpacked(cls, pickled: bytes) -> RewardCall:
        """Read what `packed` returned, and its images; the call has an `args` of its own, as a function may write to
        it. Runs code of the user's classes."""
        call, loan = pickle.loads(pickled)
        assert isinstance(call, cls)
        if loan is not None:
            IMAGES.borrow(loan)
        return call


def call_reward(call: RewardCall) -> object:
    """Call the reward function; returns a reward, for a group a list of them, or an awaitable.

    The parts of a weighted sum are kept in `sample.metadata["rewards"]`, the tests that a program failed, by reason, in
    `sample.metadata["code_failures"]`.
    """
    path, rm_type, _ = call.scorer
    sample = call.samples[0]
    if path is not None:
        return load_function(path)(call.args, list(call.samples) if call.is_group else sample, **call.kwargs)
    if runs_programs(rm_type):
        from fusionrl import sandbox

        sandbox.allow_weak(call.allow_weak_sandbox)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    score = call.kwargs.get("model_score")
    model_score = score if isinstance(score, float | int) else None
    with_regex = {"format_regex": call.format_regex} | metadata
    graded = grade(rm_type, sample.response, sample.label, with_regex, model_score)
    entries = {"rewards": graded.parts, "code_failures": graded.failures}
    if any(entries.values()):  # a new dict: the samples of a group may share theirs
        sample.metadata = metadata | {name: value for name, value in entries.items() if value}
    return graded.reward


def _pickled(value: object) -> bytes | None:
    """None: it cannot be sent to another process, and stays here."""
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs code of whatever a hook put there
        return None


@dataclass
class LostReward:
    """The reason why a sample has no reward: "timeout", "crash" or "error", and what the function said."""

    reason: str
    detail: str = ""


class RewardRaised(Exception):
    """The reward function raised; the text is what it said.

    frames     the user's own lines of its traceback, as `user_frames` gives them
    trace      all of the traceback
    positions  which of the call's samples it was at; empty where that is not known
    """

    def __init__(self, text: str, frames: str = "", trace: str = "", positions: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.frames, self.trace, self.positions = frames, trace, tuple(positions)

    @classmethod
    def of(cls, error: BaseException, call: RewardCall | None) -> RewardRaised:
        """Describe what a call raised; None: it could not be unpickled."""
        path, samples = (None, ()) if call is None else (call.scorer.path, call.samples)
        blamed = set(map(id, blamed_samples(error, path)))
        positions = [position for position, sample in enumerate(samples) if id(sample) in blamed]
        trace = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}", user_frames(error, path), trace, positions)


# ------------------------------------------------------------------------------------------------ a reward process
class _Received:
    """A call that this process has received, what its samples were like, and the answer."""

    _registered: ClassVar[dict[str, object]] = {}  # hooks of the last call

    def __init__(self, number: int, hooks: dict[str, object], packed: bytes) -> None:
        self.number, self._hooks, self._packed = number, hooks, packed
        self._call: RewardCall | None = None  # once it is unpickled

    def start(self) -> object:
        """Unpickle the call, which runs code of the user's classes, and make it; returns the reward or an awaitable."""
        if self._hooks != _Received._registered:
            register_hooks(self._hooks)
            _Received._registered = self._hooks
        call = RewardCall.unpacked(self._packed)
        self._before = [_attributes(sample) for sample in call.samples]
        self._call = call
        return call_reward(call)

    def answer(self, reward: object) -> bytes:
        """Return the frame of the reward, with what the function changed in its samples.

        Pickling runs code of the user's classes, so this may raise anything, like the function.
        """
        assert self._call is not None
        changes = []
        for sample, before in zip(self._call.samples, self._before, strict=True):
            sample.pack()  # a list that the function only read is as it was
            after = _attributes(sample)
            changes.append({name: vars(sample)[name] for name in after if after[name] != before.get(name)})
        return frame((self.number, reward, changes))

    def failure(self, error: BaseException) -> bytes:
        return frame((self.number, RewardRaised.of(error, self._call), []))


def _attributes(sample: Sample) -> dict[str, object]:
    """Return each attribute as a value that differs once it was changed; images stay what engines have seen."""
    return {name: _state(value) for name, value in vars(sample).items() if not name.startswith("multimodal_")}


def _state(value: object) -> object:
    if type(value) in _IMMUTABLE or isinstance(value, Enum):
        return value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()  # a fifth of the time of a pickle
    return pickle.dumps(value)


def serve_sync(connection: socket.socket, state: mmap.mmap) -> None:
    """Score one sample after the other."""
    while True:
        received = _Received(*receive(connection))
        state[8:16] = struct.pack("Q", received.number)
        try:
            reward = received.start()
            if inspect.isawaitable(reward):  # a plain function may return one, as a lambda or a partial does
                reward = asyncio.run(_awaited(reward))
            answer = received.answer(reward)
        except Exception as error:  # a user's function may raise anything; the pool reports it
            answer = received.failure(error)
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

    async def run(received: _Received) -> bytes:
        reward = received.start()
        if inspect.isawaitable(reward):
            reward = await reward
        return received.answer(reward)

    def finish(received: _Received, task: asyncio.Task[bytes]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            error = task.exception()  # a user's function may raise anything; the pool reports it
            connection.sendall(task.result() if error is None else received.failure(error))

    def start(received: _Received) -> asyncio.Task[bytes]:
        running.set(received.number)
        return loop.create_task(run(received))

    def on_readable() -> None:
        try:
            received = _Received(*receive(connection))
        except (EOFError, OSError):
            loop.stop()
            return
        task = contextvars.Context().run(start, received)
        tasks.add(task)
        task.add_done_callback(partial(finish, received))

    running: contextvars.ContextVar[int] = contextvars.ContextVar("running", default=0)

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        # A task that a function starts inherits its context, which names its call.
        context = more.get("context")
        number = context.get(running, 0) if context is not None else running.get()
        return asyncio.Task(_marked(coroutine, state, number), loop=loop, **more)

    loop.set_task_factory(make_task)
    beat()
    loop.add_reader(connection.fileno(), on_readable)
    loop.run_forever()
    os._exit(0)  # tasks that still run are useless, and may refuse to end


async def _marked(coroutine: Coroutine[object, object, T], state: mmap.mmap, number: int) -> T:
    """Await `coroutine`, and say before and after each of its steps whose code runs."""
    own, none = struct.pack("Q", number), struct.pack("Q", 0)

    @types.coroutine
    def steps() -> Generator[object, object, T]:
        send: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            state[8:16] = own
            try:
                yielded = send(value)
            except StopIteration as end:
                return end.value
            finally:
                state[8:16] = none
            try:
                value, send = (yield yielded), coroutine.send
            except BaseException as error:  # asyncio throws into a coroutine; passed on as it came
                value, send = error, coroutine.throw

    return await steps()


def main(arguments: Sequence[str]) -> None:
    """Take the connection, the shared memory, the kind and the log level over; score until the pool closes it."""
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
            if kind == "async":  # for requests of users' functions and of `remote_rm`: not within a sample's time limit
                importlib.import_module("aiohttp")
            connection.sendall(_READY)
            (serve_sync if kind == "sync" else serve_async)(connection, state)
        except (EOFError, ConnectionError):
            return
