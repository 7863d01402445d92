"""Equal requests of one moment are sent as one: the samples of a group, where their answers are short."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import orjson

from fusionrl.engines.generation import Generation

Send = Callable[[Mapping[str, object], bytes | None], Awaitable[list[Generation]]]
"""Sends a request, of which the second argument is the JSON if it is made already; one answer for each prompt."""


class RequestMerger:
    """The requests that wait for others like them, and the tasks that answer them. Belongs to one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[bytes, list[asyncio.Future[Generation]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, payload: Mapping[str, object]) -> Generation:
        """Send short siblings as one request: equal requests made in one turn of the event loop.

        A request of its own costs about a millisecond more, as much as a few tokens of a small model.
        Long answers go alone: the slowest sibling would hold the others back.

        Raises as `send`.
        """
        # The router takes one set of sampling parameters a request, so they are part of what siblings share.
        key = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            try:
                await asyncio.sleep(0)  # the siblings ask now
            except BaseException:  # cancelled: they are answered all the same
                if waiting:
                    self._start_answer(payload, waiting)
                raise
            finally:
                del self._waiting[key]
            if not waiting:
                return (await self._send(payload, key))[0]  # alone: no task and no future, which cost
            first: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            waiting.insert(0, first)
            self._start_answer(payload, waiting)
            return await first
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        return await future

    def _start_answer(self, payload: Mapping[str, object], waiting: list[asyncio.Future[Generation]]) -> None:
        task = asyncio.create_task(self._answer(payload, waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, payload: Mapping[str, object], waiting: list[asyncio.Future[Generation]]) -> None:
        if len(waiting) > 1:
            of_each = ("input_ids", "image_data")
            repeated = {name: [payload[name]] * len(waiting) for name in of_each if payload.get(name) is not None}
            payload = {**payload, **repeated}
        try:
            answers = await self._send(payload, None)
        except BaseException as error:  # whatever ended the request ends the wait of everyone who shares it
            for future in waiting:
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError("client closed"))
            if not isinstance(error, Exception):
                raise
            return
        for future, answer in zip(waiting, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def close(self) -> None:
        """End the requests that are under way; who waits for them gets an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
