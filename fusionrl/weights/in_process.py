"""Calls within one process (--in-process) with the interface of Ray actors: `.remote()`, `get`, `wait`, `put`.

An actor here is an object with a thread of its own, or several, or an event loop, as Ray gives it one in a process of
its own. So calls queue and overlap as under Ray, and a debugger reaches all of them. `get` and `wait` take references
of both kinds.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from functools import partial
from types import SimpleNamespace
from typing import Generic, TypeVar, overload

from fusionrl.base.pending_calls import waiting
from fusionrl.weights.remote_calls import Reference

T = TypeVar("T")


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
    with waiting(lambda: refs if isinstance(refs, list | tuple) else [refs]):
        return _get(refs, timeout)


def _get(refs: Reference[T] | Sequence[Reference[T]], timeout: float | None) -> T | list[T]:
    if isinstance(refs, LocalRef):
        answer: T = refs.future().result(timeout)
        return answer
    if isinstance(refs, list | tuple) and all(isinstance(ref, LocalRef) for ref in refs):
        return [ref.future().result(timeout) for ref in refs]
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
