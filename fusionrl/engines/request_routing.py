"""Where requests of `/generate` go, and which are sent as one.

`RequestTargets` chooses the engine of each try; a request whose answer is refused goes elsewhere. `RequestMerger` sends
equal requests of one moment as one: the samples of a group, where their answers are short.
"""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import orjson

from fusionrl.engines.answers import AnswerError, Generation, sampling_params

logger = logging.getLogger(__name__)


class RequestTargets:
    """URLs of `/generate`: those that requests go to, and those that a refused answer's request goes to instead."""

    def __init__(self, base_url: str, worker_urls: Sequence[str] = (), engine_urls: Sequence[str] = ()) -> None:
        """Arguments as of `GenerateClient`."""
        self.urls = [_generate_url(url) for url in worker_urls or [base_url]]
        self.engines = [_generate_url(url) for url in engine_urls or worker_urls or [base_url]]
        self.num_refused = 0
        """Answers that violated the bounds of their request (`AnswerBounds`)."""
        self._under_way = dict.fromkeys(self.urls, 0)

    def set_engines(self, urls: Sequence[str]) -> None:
        """Take other engines: one that died is back at another address."""
        if self.urls == self.engines:  # requests go to the engines, not to the router
            self.urls = [_generate_url(url) for url in urls]
        self.engines = [_generate_url(url) for url in urls]
        self._under_way |= {url: 0 for url in self.urls if url not in self._under_way}

    def choose(self, routing_key: str | None, attempt: int, refused: Sequence[str]) -> str:
        """Return the URL for try number `attempt`: another one for each try, and none of `refused`, if possible."""
        if refused:
            candidates = [url for url in self.engines if url not in refused] or self.engines
            candidates = sorted(candidates, key=lambda url: self._under_way.get(url, 0))
            return candidates[(attempt + self.num_refused) % len(candidates)]
        if len(self.urls) == 1:
            return self.urls[0]
        if routing_key is not None:
            first = zlib.crc32(routing_key.encode())
            return self.urls[(first + attempt) % len(self.urls)]
        return sorted(self.urls, key=self._under_way.__getitem__)[attempt % len(self.urls)]

    def refuse(self, url: str, error: AnswerError, refused: list[str]) -> None:
        """Count an answer that was refused, and add who gave it to `refused`, those of the request so far.

        The second one of an engine, or where there is one engine, raises AnswerError.
        """
        self.num_refused += 1
        refused.append(url)
        num_known = sum(refused_url in self.engines for refused_url in refused)
        if num_known >= 2 or (len(self.engines) == 1 and len(refused) >= 2):
            raise AnswerError(f"{url}: the answer is refused, as one before it was: {error}") from error
        logger.warning("%s: the answer is refused (%s); the request is sent once more, elsewhere", url, error)

    @contextmanager
    def counted(self, url: str) -> Iterator[None]:
        self._under_way[url] = self._under_way.get(url, 0) + 1
        try:
            yield
        finally:
            self._under_way[url] -= 1


def _generate_url(url: str) -> str:
    return url.rstrip("/") + "/generate"


Send = Callable[[Mapping[str, object], bytes | None], Awaitable[list[Generation]]]
"""Sends a request, of which the second argument is the JSON if it is made already; one answer for each prompt."""
_Waiting = list[tuple[int | None, asyncio.Future[Generation]]]  # seeds of the requests, and their answers


class RequestMerger:
    """The requests that wait for others like them, and the tasks that answer them. Belongs to one event loop."""

    def __init__(self, send: Send, adds_seeds: bool = True) -> None:
        """`adds_seeds`: engines give prompt i of a request its seed + i (`server_patches.add_seeds`); else requests
        with a seed go alone."""
        self._send, self._adds_seeds = send, adds_seeds
        self._waiting: dict[bytes, _Waiting] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, payload: Mapping[str, object]) -> Generation:
        """Send short siblings as one request: requests made in one turn of the event loop, equal but for their seeds,
        which follow one another.

        A request of its own costs about a millisecond more, as much as a few tokens of a small model.
        Long answers go alone: the slowest sibling would hold the others back.

        Raises as `send`.
        """
        seed = seed_of(payload)
        if seed is not None and not self._adds_seeds:
            return (await self._send(payload, None))[0]
        # The router takes one set of sampling parameters a request, so they are part of what siblings share.
        shared = with_seed(payload, None)
        key = orjson.dumps(shared, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            try:
                await asyncio.sleep(0)  # the siblings ask now
            except BaseException:  # cancelled: they are answered all the same
                self._start_answers(payload, waiting)
                raise
            finally:
                del self._waiting[key]
            if not waiting:
                # Alone: no task and no future, which cost.
                return (await self._send(payload, key if seed is None else None))[0]
            first: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            waiting.insert(0, (seed, first))
            self._start_answers(payload, waiting)
            return await first
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        waiting.append((seed, future))
        return await future

    def _start_answers(self, payload: Mapping[str, object], waiting: _Waiting) -> None:
        """Start a request for each run of consecutive seeds, and one for all requests without a seed."""
        begin = 0
        for end in range(1, len(waiting) + 1):
            seed = waiting[end - 1][0]
            follows = end < len(waiting) and waiting[end][0] == (None if seed is None else seed + 1)
            if not follows:
                futures = [future for _, future in waiting[begin:end]]
                task = asyncio.create_task(self._answer(with_seed(payload, waiting[begin][0]), futures))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                begin = end

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


def seed_of(payload: Mapping[str, object]) -> int | None:
    """Return the `sampling_seed` of a request."""
    seed = sampling_params(payload).get("sampling_seed")
    return seed if isinstance(seed, int) else None


def with_seed(payload: Mapping[str, object], seed: int | None) -> Mapping[str, object]:
    """Return the request with this `sampling_seed`, or without one."""
    params = {name: value for name, value in sampling_params(payload).items() if name != "sampling_seed"}
    return {**payload, "sampling_params": params if seed is None else {**params, "sampling_seed": seed}}
