"""One event loop for a process's user code, and objects that work from any loop.

A rollout function may run its coroutines by `asyncio.run`, on a loop in a thread of its own, or by `run` here. Objects
bound to a loop (connections, a semaphore) are made for each loop, and end with it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TypeVar

from fusionrl.base.process import made_once

T = TypeVar("T")


def run(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine on one event loop that lives as long as the process, and wait for its result.

    For rollout functions, which are synchronous; sessions that they open there stay usable in the next rollout.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, process_loop()).result()


@made_once
def process_loop() -> asyncio.AbstractEventLoop:
    """Return that loop, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="plugin-loop", daemon=True).start()
    return loop


class LoopSemaphore:
    """A semaphore for any event loop: each loop has `limit` places of its own."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def __deepcopy__(self, memo: dict[int, object]) -> LoopSemaphore:
        return self  # it belongs to the process, also where a hook copies its `args`

    def _own(self) -> asyncio.Semaphore:
        return self._of_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limit))

    async def acquire(self) -> bool:
        return await self._own().acquire()

    def release(self) -> None:
        self._own().release()

    @property
    def _value(self) -> int:
        """Places that are free on the running loop; all of them where none runs."""
        try:
            return self._own()._value
        except RuntimeError:
            return self.limit

    def locked(self) -> bool:
        return self._own().locked()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self.release()


_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncGenerator[None, None]]] = (
    weakref.WeakKeyDictionary()
)


def close_with_loop(close: Callable[[], Awaitable[object]]) -> None:
    """Let the running event loop await `close()` when it ends.

    A loop that ends by `asyncio.run` closes the asynchronous generators that wait in it; so one waits here.
    """

    async def wait() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await close()

    waiting = wait()
    try:
        waiting.__anext__().send(None)  # up to the yield, which awaits nothing
    except StopIteration:
        _waiting.setdefault(asyncio.get_running_loop(), []).append(waiting)
