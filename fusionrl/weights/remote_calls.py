"""Calls of other processes or threads, and what the ranks report on their part of a push.

`get`, `wait` and `put` take references of Ray and of this process (--in-process). A `LocalActor` is an object with a
thread of its own, or several, or an event loop, as Ray gives it one in a process of its own. So calls queue and overlap
as under Ray, and a debugger reaches all of them.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from functools import partial
from math import sqrt
from types import SimpleNamespace
from typing import Any, Generic, NotRequired, Protocol, TypedDict, TypeVar, overload

_waits: list[Callable[[], Iterable[object]]] = []


@contextmanager
def waiting(pending: Callable[[], Iterable[object]]) -> Iterator[None]:
    """Say within the block for whom this process waits. `pending` is called from any thread, and must not block."""
    _waits.append(pending)
    try:
        yield
    finally:
        _waits.remove(pending)


def waited_for() -> list[object]:
    """Return the calls that the innermost wait of this process waits for; [] if it can name none."""
    for pending in reversed(_waits.copy()):
        if calls := list(pending()):
            return calls
    return []


T = TypeVar("T")


class Reference(Protocol[T]):
    """The answer of an actor that is under way: a Ray ObjectRef."""

    def future(self) -> Future[T]:
        """The same as a future."""


def stamp_of(version: int | None) -> dict[str, object]:
    """Return the other fields of a request with weights: the version, or None if more will come, and "flush"."""
    return {"version": None if version is None else str(version), "flush_cache": version is not None}


def future_of(call: Future[T] | Reference[T]) -> Future[T]:
    """The future of a started call: a Ray reference's, or the call itself."""
    return call if isinstance(call, Future) else call.future()


def wait_all(calls: Sequence[tuple[str, Future[T] | Reference[T]]], timeout_s: float) -> list[T]:
    """Results of all (what it is, started call), in order; raises once one has failed, as others may wait for it."""
    names = {future_of(call): name for name, call in calls}
    deadline = time.monotonic() + timeout_s
    pending = set(names)
    with waiting(lambda: [names[future] for future in pending]):
        while pending:
            done, pending = wait_futures(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                waited = ", ".join(sorted(names[future] for future in pending))
                raise RuntimeError(f"{waited}: no end after {timeout_s:.0f} s (--update-weight-timeout-s)")
            for future in done:
                error = future.exception()
                if error is not None:
                    cause = getattr(error, "cause", None) or error  # of a Ray actor, whose text is its whole traceback
                    raise RuntimeError(f"{names[future]}: {cause}") from error
    return [future.result() for future in names]


# ------------------------------------------------------------------------------------ reports of the ranks
class SendReport(TypedDict):
    """Report of one rank that sends over the network. Clocks are the machine's; a rank that sent nothing has none."""

    bytes: int  # each once, however many engines received it
    buckets: int
    calls: int  # of engines
    first_s: NotRequired[float]  # when the first byte left
    last_s: NotRequired[float]  # when the last call ended


class WriteReport(TypedDict):
    """The files of one version that all ranks wrote together."""

    folder: str
    bytes: int
    files: int
    density: float  # the changed share of all elements


MergeLosses = tuple[float, float]
"""(lost, added) of `adapters.MergeSums`."""


def merge_loss(losses: Iterable[MergeLosses]) -> float:
    """Return ‖round(W + s B A) - (W + s B A)‖ / ‖s B A‖ over the ranks' weights; 0 where adapters add nothing."""
    lost, added = (sum(sums) for sums in zip(*losses, strict=True))
    return sqrt(lost / added) if added else 0.0


def note_sent(report: SendReport, start: float, *, num_bytes: int, num_buckets: int = 1, num_calls: int = 0) -> None:
    """Add a bucket whose calls began at `start`, by the machine's clock, and have ended now."""
    report["bytes"] += num_bytes
    report["buckets"] += num_buckets
    report["calls"] += num_calls
    report.setdefault("first_s", start)
    report["last_s"] = time.time()


def new_send_report() -> SendReport:
    """The report of a rank that has sent nothing yet."""
    return {"bytes": 0, "buckets": 0, "calls": 0}


class LocalRef(Generic[T]):
    """The answer of a call in this process. It may be awaited."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def future(self) -> Future[T]:
        """Return the same as a future."""
        return self._future

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(self._future).__await__()


def put(value: T) -> LocalRef[T]:
    """Return a reference to a value, which is shared and not copied: receivers must not write to it."""
    future: Future[T] = Future()
    future.set_result(value)
    return LocalRef(future)


@overload
def get(refs: Reference[T], timeout: float | None = None) -> T: ...
@overload
def get(refs: Sequence[Reference[T]], timeout: float | None = None) -> list[T]: ...
def get(refs: Reference[T] | Sequence[Reference[T]], timeout: float | None = None) -> T | list[T]:
    """Wait for an answer, or for all of several; raises what a call raised.

    Raises TimeoutError after `timeout` seconds.
    """
    all_refs: Sequence[Any] = refs if isinstance(refs, list | tuple) else [refs]
    with waiting(lambda: all_refs):
        if all(isinstance(ref, LocalRef) for ref in all_refs):
            answers = [ref.future().result(timeout) for ref in all_refs]
            return answers if isinstance(refs, list | tuple) else answers[0]
        import ray

        return ray.get(refs, timeout=timeout)


def wait(
    refs: Sequence[Reference[T]], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Reference[T]], list[Reference[T]]]:
    """Wait until `num_returns` calls have ended, or `timeout` seconds. Return (ended, the others), in order."""
    if not all(isinstance(ref, LocalRef) for ref in refs):
        import ray

        ended, remaining = ray.wait(list(refs), num_returns=num_returns, timeout=timeout)
        return ended, remaining
    pending = {ref.future() for ref in refs}
    num_open = max(len(pending) - num_returns, 0)
    while len(pending) > num_open:
        done, pending = wait_futures(pending, timeout, FIRST_COMPLETED)
        if not done:
            break
    done_refs = [ref for ref in refs if ref.future().done()][:num_returns]
    return done_refs, [ref for ref in refs if not any(ref is done for done in done_refs)]


def gather(refs: Sequence[Reference[T]], check: Callable[[], None] = lambda: None, interval_s: float = 1.0) -> list[T]:
    """Return all answers. Raises at the first failure, wherever it stands: others may wait for the one that failed.

    `check` is called about once in `interval_s` seconds while calls are under way, and may raise to end the wait.
    """
    pending = list(refs)
    with waiting(lambda: pending):
        while pending:
            done, pending = wait(pending, num_returns=1, timeout=interval_s)
            get(done)
            if pending:
                check()
    return get(list(refs))


class LocalActor:
    """An object whose methods are called as those of a Ray actor: `actor.method.remote(…)` returns a `LocalRef`."""

    def __init__(self, make: Callable[[], object], name: str, num_threads: int = 1) -> None:
        """Make the object in the first of its threads; async methods run on an event loop of its own."""
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._name, self._num_threads = name, num_threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        # Daemons: a thread in a debugger must not delay the end of the process.
        for number in range(num_threads):
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True).start()
        self._target = self._call(make).future().result()

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self._call, getattr(self._target, name)))

    def _call(self, method: Callable[..., object], /, *args: object, **kwargs: object) -> LocalRef:
        """Begin the call; returns at once."""
        if inspect.iscoroutinefunction(method):
            return LocalRef(asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._event_loop()))
        future: Future[object] = Future()
        self._calls.put((future, partial(method, *args, **kwargs)))
        return LocalRef(future)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised by the caller that waits
                future.set_exception(error)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=f"{self._name}-loop", daemon=True).start()
            return self._loop


def end(actor: LocalActor) -> None:
    """Let an actor's threads end when they have nothing to do."""
    for _ in range(actor._num_threads):
        actor._calls.put(None)
    with actor._lock:
        if actor._loop is not None:
            actor._loop.call_soon_threadsafe(actor._loop.stop)
            actor._loop = None
