"""Asynchronous client of `/generate`, of an engine or of the router.

aiohttp is imported by the first request: a run's command and its trainers import this module and send none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np
import orjson

from fusionrl.base.sockets import noticing_socket
from fusionrl.engines.answers import (
    LONG_BYTES,
    AnswerBounds,
    AnswerError,
    Generation,
    StreamParser,
    checked_event,
    extremes,
    join,
    num_new_tokens,
    parse_answer,
    prompt_of,
    sampling_params,
)
from fusionrl.engines.http import EndpointError, auth_headers
from fusionrl.engines.request_routing import RequestMerger, RequestTargets

if TYPE_CHECKING:
    import aiohttp

    from fusionrl.engines.images import MediaTokens
    from fusionrl.engines.parser_processes import ParserProcesses

logger = logging.getLogger(__name__)

ROUTING_KEY = "X-SMG-Routing-Key"  # as the router knows it
_FIRST_BACKOFF_S = 0.25
_SHORT_TOKENS = 64
_LONGEST_ERROR_BYTES = 1 << 16  # of the text of an error status
_MOST_EMPTY_EVENTS = 10_000  # of a stream, one after the other
_LONGEST_BACKOFF_S = 8.0  # a router that lost its engines' health for a moment gets them back
# An answer sampled with only these parameters can be continued by another engine at any token. A stop string, a grammar
# or a penalty depends on the whole answer, and the second engine sees only its own part.
_CONTINUABLE = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "ignore_eos", "n", "sampling_seed")
    + ("stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
)


class GenerateClient:
    """Sends `/generate` requests over kept connections. Belongs to one event loop; close it there."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        max_connections: int = 1024,
        *,
        vocab_size: int | None = None,
        media: MediaTokens | None = None,
        num_tries: int = 10,
        stream_responses: bool = False,
        worker_urls: Sequence[str] = (),
        engine_urls: Sequence[str] = (),
        adds_seeds: bool = True,
        least_version: Callable[[], int | None] = lambda: None,
    ) -> None:
        """A request whose answer is refused (`answers`) is sent once more, to another engine, which is named if it errs
        too. Through the router the answering engine is unknown; there a second one is tried.

        timeout_s         of one request, retries included
        max_connections   requests under way
        vocab_size        `input_ids` outside [0, vocab_size) are refused here: such an id ends an SGLang server, and
                          the router would try the request on the next one
        media             of a model that is asked about images: requests whose placeholders have no images, or the
                          other way round, are refused here
        num_tries         at one request; the pauses between ten of them add up to about 40 s
        stream_responses  `generate` reads a stream: what an engine that died had sent is kept
        worker_urls       requests go to these engines and not to `base_url`, for the router drops fields that it does
                          not know: to the engine of a routing key, else to the one with the fewest under way
        engine_urls       those that a refused answer's request is sent to; default: `worker_urls`
        adds_seeds        see `RequestMerger`; fusionrl has started all engines
        least_version     of the weights that engines have when a request is sent: an answer of older ones is refused,
                          also one of a checkpoint's. None: any version is right
        """
        self._vocab_size, self._media = vocab_size, media
        self._least_version = least_version
        self._num_tries = num_tries
        self._stream_responses = stream_responses
        self.num_retries = 0
        """Requests sent again, after a broken connection or a 5xx answer."""
        self.num_tokens_kept = 0
        """Tokens of dead engines that another engine continued."""
        self._targets = RequestTargets(base_url, worker_urls, engine_urls)
        # No compression: a small body could become any size in memory.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **auth_headers(api_key)}
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._merger = RequestMerger(self._request, adds_seeds)
        self._parsers: ParserProcesses | None = None

    @property
    def num_answers_refused(self) -> int:
        """Answers that violated the bounds of their request (`AnswerBounds`)."""
        return self._targets.num_refused

    def set_engines(self, urls: Sequence[str]) -> None:
        """Send requests to these engines from now on; those under way stay where they are."""
        self._targets.set_engines(urls)

    async def generate(self, payload: Mapping[str, object], routing_key: str | None = None) -> Generation:
        """Send one request in SGLang's form (`input_ids` or `text`, `sampling_params`, ...).

        Requests of one `routing_key` go to one engine, where the router's policy keeps to keys (`manual`).

        `return_logprob` is set unless the payload has it. Broken connections and 5xx answers are tried
        again with growing pauses. Raises RuntimeError with the server's text for a 4xx answer at once and for the last
        failed try, AnswerError for the second answer that is refused, TimeoutError after `timeout_s` seconds.
        """
        params = sampling_params(payload)
        if params.get("n", 1) != 1:
            raise ValueError("sampling_params.n must be 1: send one request a sample")
        self._check_tokens(payload)
        reads_ids = payload.get("input_ids") is not None
        if self._stream_responses and reads_ids and not uncontinuable(params):
            return join([piece async for piece in self.stream(payload, routing_key)])
        if routing_key is None and reads_ids and num_new_tokens(payload) <= _SHORT_TOKENS:
            return await self._merger.generate({"return_logprob": True, **payload})
        return (await self._request({"return_logprob": True, **payload}, None, routing_key))[0]

    async def stream(
        self, payload: Mapping[str, object], routing_key: str | None = None
    ) -> AsyncGenerator[Generation, None]:
        """Send one request with `input_ids`, and yield what is sampled as it comes. The last piece alone has a finish
        reason. Leaving the loop ends the request; at once, where the generator is closed. A piece has the
        versions of its tokens from a server of this project (`server_patches.stamp_streams`); from another, the version
        at the time of sending, and `join` takes those of the last event.

        If an engine dies, another continues after the tokens received so far: the pieces follow one another, and
        `part` counts the requests. Where a placeholder of an image or another medium is among them, none can: the
        answer ends there, as at its limit. Stop strings, grammars and penalties then see the tokens since alone;
        `generate` asks for such answers as a whole.

        Raises as `generate`.
        """
        import aiohttp

        self._check_tokens(payload)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        tokens: list[int] = []
        part, attempt, finished = 1, 0, False
        url, num_empty = "", 0
        refused: list[str] = []
        while True:
            before = len(tokens)
            url = self._targets.choose(routing_key, attempt, refused)
            request = {"return_logprob": True, **continued(payload, tokens), "stream": True}
            bounds = AnswerBounds.by(request, self._vocab_size, self._least_version())
            try:
                async with aclosing(self._events(url, request, bounds, routing_key, deadline)) as events:
                    parser = StreamParser(bounds)
                    async for event in events:
                        piece = parser.parse(event)
                        num_empty = 0 if len(piece.tokens) else num_empty + 1
                        if num_empty > _MOST_EMPTY_EVENTS:
                            raise AnswerError(f"the body: {num_empty} events of a stream brought no token")
                        tokens += piece.tokens.tolist()
                        finished = bool(piece.finish_reason)
                        yield replace(piece, part=part)
                error: RuntimeError | None = RuntimeError(f"{url}: the stream ended before the last token")
            except AnswerError as cause:
                self._targets.refuse(url, cause, refused)
                attempt, error = 0, None
            except EndpointError as cause:
                if cause.status < 500:
                    raise
                error = cause
            except aiohttp.ClientError as cause:
                error = RuntimeError(f"{url} did not answer to the end: {cause!r}")
            if finished:
                return
            if self._media is not None and self._media.bar(tokens):
                # No engine can continue it: it ends after the last piece that came.
                end = replace(piece, tokens=piece.tokens[:0], log_probs=piece.log_probs[:0], text="", part=part)
                yield replace(end, weight_versions=[], finish_reason="length")
                return
            if len(tokens) > before:
                self.num_tokens_kept += len(tokens) - before
                part, attempt = part + 1, 0
            if error is not None:
                await self._before_retry(attempt, error)
                attempt += 1

    async def _events(
        self, url: str, payload: Mapping[str, object], bounds: AnswerBounds, routing_key: str | None, deadline: float
    ) -> AsyncGenerator[Mapping[str, object], None]:
        """The events of one streamed answer (`data: {...}` lines, the last one `data: [DONE]`)."""
        body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = None if routing_key is None else {ROUTING_KEY: routing_key}
        with self._targets.counted(url):
            async with asyncio.timeout_at(deadline):
                response = await self._open().post(url, data=body, headers=headers)
            # Closing it early breaks the connection, by which the engine learns that the client is gone.
            async with aclosing(_lines(response, deadline, bounds)) as lines:
                if response.status >= 400:
                    async with asyncio.timeout_at(deadline):
                        text = (await response.content.read(_LONGEST_ERROR_BYTES)).decode(errors="replace")
                    raise EndpointError(url, response.status, text)
                _check_plain(response)
                num_idle = 0  # bytes since the last event
                async for line, is_whole in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data == line.strip() or data == b"[DONE]":
                        num_idle += len(line) + 1
                        bounds.check_size(num_idle)
                        continue  # no event, or the end
                    num_idle = 0
                    try:
                        event = orjson.loads(data)
                    except orjson.JSONDecodeError as error:
                        if is_whole:
                            raise AnswerError(f"the body: an event is not JSON ({error}): {data[:80]!r}") from error
                        # It ended within an event: as good as a broken connection.
                        raise EndpointError(url, 502, f"half an event of a stream: {data[:200]!r}") from error
                    yield checked_event(url, event)

    async def _request(
        self, payload: Mapping[str, object], body: bytes | None, routing_key: str | None = None
    ) -> list[Generation]:
        """Send `payload`, of which `body` is the JSON if it is made already."""
        if body is None:
            body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        bounds = AnswerBounds.by(payload, self._vocab_size, self._least_version())
        refused: list[str] = []
        async with asyncio.timeout(self._timeout_s):
            while True:
                url, answer = await self._send(body, bounds, routing_key, refused)
                try:
                    if isinstance(answer, AnswerError):
                        raise answer
                    if len(answer) < LONG_BYTES:
                        return parse_answer(answer, bounds)
                    if self._parsers is None:
                        from fusionrl.engines.parser_processes import ParserProcesses

                        self._parsers = ParserProcesses()
                    return await self._parsers.parse(answer, bounds)
                except AnswerError as error:
                    self._targets.refuse(url, error, refused)

    def _check_tokens(self, payload: Mapping[str, object]) -> None:
        if self._media is not None:
            from fusionrl.engines.images import check_images

            check_images(payload, self._media)
        if self._vocab_size is None or payload.get("input_ids") is None:
            return
        least, largest = extremes(prompt_of(payload))
        if least < 0 or largest >= self._vocab_size:
            raise ValueError(
                f"input_ids hold {least}..{largest}, the model's tokens are 0..{self._vocab_size - 1}; use the model's"
                " tokenizer"
            )

    async def _send(
        self, body: bytes, bounds: AnswerBounds, routing_key: str | None, refused: Sequence[str]
    ) -> tuple[str, bytes | AnswerError]:
        """(who answered, the body of the answer, or what is wrong with it before it is read).

        refused  who gave answers that were refused; this one comes from elsewhere.
        """
        import aiohttp

        headers = None if routing_key is None else {ROUTING_KEY: routing_key}
        attempt = 0
        while True:
            url = self._targets.choose(routing_key, attempt, refused)
            try:
                with self._targets.counted(url):
                    # As a payload: aiohttp would look through the types that it knows for one of bytes.
                    data = aiohttp.BytesPayload(body)
                    async with self._open().post(url, data=data, headers=headers) as response:
                        if response.status < 400:
                            return url, await _body(response, bounds)
                        text = await response.content.read(_LONGEST_ERROR_BYTES)
                error: RuntimeError = EndpointError(url, response.status, text.decode(errors="replace"))
                if response.status < 500:
                    raise error
            except aiohttp.ClientError as cause:
                error = RuntimeError(f"{url} did not answer: {cause!r}")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and task is not None and not task.cancelling():
                    raise RuntimeError("client closed") from None  # aiohttp cancels who waits for a connection
                raise
            await self._before_retry(attempt, error)
            attempt += 1

    async def _before_retry(self, attempt: int, error: RuntimeError) -> None:
        """Count and wait, longer from try to try; raise `error` after the last one."""
        if self._is_closed or attempt + 1 >= self._num_tries:
            raise error
        self.num_retries += 1
        logger.info("try %d of a request failed: %s", attempt + 1, error)
        await asyncio.sleep(min(_FIRST_BACKOFF_S * 2**attempt, _LONGEST_BACKOFF_S))
        if self._is_closed:  # in the meantime
            raise error

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._is_closed:
            raise RuntimeError("client closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, socket_factory=noticing_socket),
                # The whole request has its bound in `generate`; aiohttp's own default is five minutes.
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and each request would look through the jar
                auto_decompress=False,
            )
        return self._session

    async def close(self) -> None:
        """Close the connections; what is still under way fails."""
        self._is_closed = True
        await self._merger.close()
        if self._parsers is not None:
            await self._parsers.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        self._is_closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _check_plain(response: aiohttp.ClientResponse) -> None:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise AnswerError(f"the body is compressed ({encoding}), which was not asked for")


async def _body(response: aiohttp.ClientResponse, bounds: AnswerBounds) -> bytes | AnswerError:
    """The body, or what is wrong with it; no more of it is in memory than an answer can have."""
    try:
        _check_plain(response)
        if response.content_length is not None:  # aiohttp reads no more than that
            bounds.check_size(response.content_length)
            return await response.read()
        parts, size = [], 0
        async for data in response.content.iter_any():
            size += len(data)
            bounds.check_size(size)
            parts.append(data)
    except AnswerError as error:
        return error
    return b"".join(parts)


async def _lines(
    response: aiohttp.ClientResponse, deadline: float, bounds: AnswerBounds
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """(a line of a body, whether it came to its end). Lines have any length that an answer can have (aiohttp's own
    reader has a limit); `deadline` is the loop's time."""
    rest = b""
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                data = await response.content.readany()
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            bounds.check_size(len(rest))
            for line in lines:
                yield line, True
        yield rest, False
        response.release()
    finally:
        response.close()


def uncontinuable(params: Mapping[str, object]) -> list[str]:
    """Return the sampling parameters in use by which an answer cannot be continued as a new request."""
    return [name for name, value in params.items() if value and name not in _CONTINUABLE]


def continued(payload: Mapping[str, object], tokens: list[int]) -> Mapping[str, object]:
    """Return the request that continues an answer after its first `tokens`."""
    if not tokens:
        return payload
    params = dict(sampling_params(payload))
    params["max_new_tokens"] = num_new_tokens(payload) - len(tokens)
    if isinstance(least := params.get("min_new_tokens"), int):
        params["min_new_tokens"] = max(0, least - len(tokens))
    ids = np.asarray(payload["input_ids"]).tolist()
    return {**payload, "input_ids": ids + tokens, "sampling_params": params}


async def abort_all(engine_urls: Sequence[str], api_key: str | None = None, timeout_s: float = 30.0) -> None:
    """Make every engine answer its running and waiting requests now, finish reason "abort".

    The router does not pass this on, so it goes to the engines. One that does not answer is logged: a dead engine has
    nothing to abort, and the driver looks after it. RuntimeError names those that refused.
    """
    import aiohttp

    timeout, headers = aiohttp.ClientTimeout(total=timeout_s), auth_headers(api_key)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:

        async def abort(url: str) -> None:
            try:
                async with session.post(f"{url}/abort_request", json={"abort_all": True}) as response:
                    if response.status >= 400:
                        raise EndpointError(f"{url}/abort_request", response.status, await response.text())
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("abort_request to %s: no answer: %r", url, error)

        results = await asyncio.gather(*(abort(url) for url in engine_urls), return_exceptions=True)
    failed = [f"{url}: {result!r}" for url, result in zip(engine_urls, results, strict=True) if result]
    if failed:
        raise RuntimeError("abort_request failed: " + "; ".join(failed))
