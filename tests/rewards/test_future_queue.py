"""Futures of other threads on an event loop: results, errors, cancelling, closed loops, many at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from fusionrl.rewards.future_queue import _mailboxes, result_of


def _ended(value: object = None, error: BaseException | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
    return future


def test_results_and_errors() -> None:
    async def use() -> list[Any]:
        ended = [_ended(1), _ended(error=ValueError("no")), _ended(error=StopIteration("end")), _ended(2)]
        return await asyncio.wait_for(asyncio.gather(*map(result_of, ended), return_exceptions=True), 10)

    one, no, stopped, two = asyncio.run(use())
    assert (one, two) == (1, 2) and isinstance(no, ValueError)
    assert isinstance(stopped, RuntimeError) and "StopIteration: end" in str(stopped)


def test_many_of_several_threads_all_come_and_wake_the_loop_seldom() -> None:
    count, num_threads, woken = 400, 4, 0

    async def use() -> list[Any]:
        nonlocal woken
        loop, futures = asyncio.get_running_loop(), [Future[int]() for _ in range(count)]
        usual = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal woken
            woken += 1
            return usual(*args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

        def end(first: int) -> None:
            for number in range(first, count, num_threads):
                futures[number].set_result(number)

        waiting = [asyncio.create_task(result_of(future)) for future in futures]
        await asyncio.sleep(0)  # each waits
        threads = [threading.Thread(target=end, args=(first,)) for first in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # the loop stands still meanwhile
        return await asyncio.wait_for(asyncio.gather(*waiting), 10)

    assert asyncio.run(use()) == list(range(count))
    assert 1 <= woken <= num_threads  # threads may look at the sign at the same moment


def test_who_gives_up_cancels_the_future_and_the_other_way_round() -> None:
    async def use() -> tuple[Future[Any], Any]:
        one, other = Future[Any](), Future[Any]()
        waiting = [asyncio.create_task(result_of(future)) for future in (one, other)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        other.cancel()
        return one, await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)

    given_up, found = asyncio.run(use())
    assert given_up.cancelled() and [type(one) for one in found] == [asyncio.CancelledError] * 2


def test_what_ends_after_its_loop_is_kept_nowhere() -> None:
    futures = [Future[Any]() for _ in range(3)]
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(result_of(future)) for future in futures]
    loop.run_until_complete(asyncio.sleep(0))
    assert loop in _mailboxes
    loop.close()
    for future in futures:  # also what ends after the first one
        future.set_result(1)
    known = weakref.ref(loop)
    del tasks, loop, future, futures
    gc.collect()
    assert known() is None
