"""An event loop in a thread of its own, and one that applies events to the controller's state in a recorded order."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, get_args

from fusionrl.buffer.schedule import Entry, Schedule, entry_of
from fusionrl.pipeline.controller import apply
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Action, Drop, Event, GroupReady, Push, Pushed, Started, State
from fusionrl.rollout.turn_versions import EngineVersions, Turns

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
            self._wake_up()
            self._thread.join(_JOIN_S)  # a function that ignores its end is ended with the process

    def _wake_up(self) -> None:
        """Let `_main` look again; from any thread."""
        with suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._wake.set)

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

    def _call(
        self, function: Callable[..., T], *args: object, start: Callable[[Callable[[], None]], None] | None = None
    ) -> T:
        """Run a function in the thread and wait for its result; `start`, in the thread, may put off the call."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:  # the caller's
                done.set_exception(error)

        self._post(call if start is None else partial(start, call), done)
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


class ScheduledLoop(LoopThread):
    """Owns the controller's state; what happens to it is written to the schedule, and follows its record.

    Without a schedule nothing is written, and without a record, or after its end, nothing is held back. If a push
    changes the weights within answers, the record has the versions of these, too.
    """

    def __init__(self, state: State, knobs: Knobs, schedule: Schedule | None, version: int = 0) -> None:
        """`version`: of the engines' weights, as their tokens have it."""
        super().__init__()
        self.state, self.knobs = state, knobs
        self._schedule = schedule
        self._versions: EngineVersions | None = None
        if schedule is not None and knobs.in_flight == "retract":
            self._versions = EngineVersions(version, schedule.turns, self._wake_up)
        self._held_back: list[tuple[list[Entry], Callable[[], None]]] = []  # events' entries, what one of them runs

    def _run(self, started: Future[None]) -> None:
        super()._run(started)
        if self._schedule is not None:  # until now a caller's event may still come, as while clients close
            self._schedule.close()

    def _happen(self, event: Event | Drop, turns: Turns | str | None = None) -> None:
        self._apply(event, turns)
        self._wake.set()

    def _apply(self, event: Event | Started, turns: Turns | str | None = None) -> None:
        if self._schedule is not None:
            self._schedule.note(event, turns)
        apply(self.state, self.knobs, event)

    def _is_due(self, action: Action) -> bool:
        if isinstance(action, Push) and self._versions is not None and self._versions.are_needed():
            return False
        return self._schedule is None or not isinstance(action, get_args(Started)) or self._schedule.is_due(action)

    def _when_due(self, event: Event, function: Callable[[], None]) -> None:
        """Run a function now or, where a record is followed, at the place of `event` in it."""
        if self._schedule is None or self._schedule.next is None:
            function()
        else:
            self._held_back.append(([entry_of(event)], function))
            self._wake.set()

    def _when_pushed(self, version: int, function: Callable[[], None]) -> None:
        """Run a function at the place of the push's end, before which answers of the new weights may have ended."""
        if self._versions is not None:
            self._versions.push(version)
        self._when_due(Pushed(), function)

    async def _end_is_due(self, ordinal: int) -> None:
        """Wait until the end of a group is next in the record that is followed; return at once without one."""
        if self._schedule is not None and self._schedule.next is not None:
            due: Future[None] = Future()
            ends = [entry_of(event) for event in (GroupReady(ordinal), Drop(ordinal, "filtered"))]
            self._held_back.append((ends, partial(_resolve, due)))
            self._wake.set()
            await asyncio.wrap_future(due)

    def _release(self) -> None:
        """Run what was held back and is due, one after the other."""
        if self._schedule is None:
            return
        while self._held_back:
            following = self._schedule.next
            place = next((i for i, (entries, _) in enumerate(self._held_back) if _is_one(following, entries)), None)
            if place is None:
                return
            self._held_back.pop(place)[1]()


def _is_one(following: Entry | None, entries: list[Entry]) -> bool:
    """Return whether the record has one of these events next, or has ended; it may say more of an event."""
    return following is None or any(following[: len(entry)] == entry for entry in entries)


def _resolve(due: Future[None]) -> None:
    if not due.done():
        due.set_result(None)
