"""Waiting on an event loop for futures that another thread ends: many that end together wake the loop once.

`asyncio.wrap_future` wakes it for each of them, by a call of the system from a thread that holds the interpreter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class _Mailbox:
    """What has ended and was not yet told to the loop that waits for it."""

    def __init__(self) -> None:
        self._ended: deque[tuple[asyncio.Future[object], Future[object]]] = deque()
        self._is_told = False

    def put(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[object], future: Future[object]) -> None:
        """From any thread: a future has ended."""
        self._ended.append((waiter, future))
        if not self._is_told:  # else the loop is still to deliver: it takes the sign away before it looks
            self._is_told = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed, and nobody waits: what is kept here would keep the loop
                self._is_told = False  # so that the next one that ends is not kept either
                self._ended.clear()

    def _deliver(self) -> None:
        self._is_told = False
        while self._ended:
            waiter, future = self._ended.popleft()
            if waiter.done():
                continue
            if future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is None:
                waiter.set_result(future.result())
            elif isinstance(error, StopIteration):  # no future takes it, as it would end who awaits it
                waiter.set_exception(RuntimeError(f"StopIteration: {error}"))
            else:
                waiter.set_exception(error)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


async def result_of(future: Future[T]) -> T:
    """Wait for a future of another thread. Whoever is cancelled here cancels it, and the other way round.

    Raises:
        what the future raises.
    """
    loop = asyncio.get_running_loop()
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = _Mailbox()
    waiter: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(partial(mailbox.put, loop, waiter))  # type: ignore[arg-type]
    try:
        return await waiter
    except asyncio.CancelledError:
        future.cancel()
        raise
