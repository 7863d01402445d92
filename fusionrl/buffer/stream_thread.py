"""A thread with its own event loop, and calls into it from other threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

_JOIN_S = 30.0  # for the tasks under way to end when they are cancelled
_ENDED = "the stream has ended"
T = TypeVar("T")


class LoopThread:
    """Runs `_main` in its thread. It ends with `stop`, or with the first error, which the next call raises."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._lock = threading.RLock()  # of the two that follow; a future that ends takes itself off
        self._has_ended = False
        self._asked: set[Future[Any]] = set()  # what others wait for

    async def _main(self, started: Future[None]) -> None:
        """Work until `_is_ending`; set `started` once calls may come."""
        raise NotImplementedError

    def start(self) -> None:
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="stream", daemon=True)
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """End everything that is under way."""
        if self._thread is not None and self._thread.is_alive():
            self._is_ending = True
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._wake.set)
            self._thread.join(_JOIN_S)  # a function that ignores its end is ended with the process

    def _run(self, started: Future[None]) -> None:
        self._asked.add(started)
        try:
            asyncio.run(self._looped(started))
        except BaseException as error:  # raised again by the next call
            self._error = error
        with self._lock:
            self._has_ended = True
            for future in list(self._asked):
                if not future.done():
                    future.set_exception(self._error or RuntimeError(_ENDED))

    async def _looped(self, started: Future[None]) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        await self._main(started)

    def _call(self, function: Callable[..., T], *args: object) -> T:
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:  # the caller's
                done.set_exception(error)

        self._post(call, done)
        return done.result()

    def _read(self, function: Callable[[], T]) -> T:
        """Run a function that changes nothing: in the thread, or here when that has ended."""
        with self._lock:
            if self._has_ended:
                return function()
        return self._call(function)

    def _post(self, function: Callable[[], None], answer: Future[Any]) -> None:
        """Run a function in the thread; `answer` gets an error where it has ended, or ends before."""
        with self._lock:
            if self._has_ended or self._thread is None:
                answer.set_exception(self._error or RuntimeError(_ENDED))
                return
            self._asked.add(answer)
            answer.add_done_callback(self._asked.discard)
            with suppress(RuntimeError):  # the loop has just been closed: `_run` tells who asks
                self._loop.call_soon_threadsafe(function)
