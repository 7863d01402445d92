"""GenerateClient against a small server that fails on demand."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fusionrl.engines.answers import parse_generation
from fusionrl.engines.client import ROUTING_KEY, GenerateClient, abort_all
from tests.engines.streaming import Answers, serve_all

ANSWER = {
    "text": "ab",
    "output_ids": [97, 98],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, 97, None], [-1.25, 98, None]],
    },
}


def _serve(handler: Answers, use: Callable[[str], Awaitable[Any]], path: str = "/generate") -> Any:
    """Run `use(url)` while a server answers `path` with `handler`."""
    return serve_all(handler, lambda urls: use(urls[0]), 1, path)


def _ask(handler: Answers, *requests: dict[str, Any], **options: Any) -> list[Any]:
    """The answers of a client to requests of one moment, and their errors."""

    async def use(url: str) -> list[Any]:
        async with GenerateClient(url, **options) as client:
            return await asyncio.gather(*map(client.generate, requests), return_exceptions=True)

    return _serve(handler, use)


def _request(*ids: int, count: int = 2) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": count}}


def _answer(**meta: Any) -> dict[str, Any]:
    return {**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}}


def test_arrays_and_versions() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "warm", "start": 1, "end": 2}]
    made = parse_generation(_answer(weight_versions=spans))
    assert (made.tokens.dtype, made.log_probs.dtype) == (np.int32, np.float32)
    assert (made.tokens.tolist(), made.log_probs.tolist()) == ([97, 98], [-0.5, -1.25])
    assert made.weight_versions == [(4, 1), ("warm", 1)]
    assert (made.finish_reason, made.prompt_tokens, made.cached_tokens) == ("length", 3, 1)
    assert "output_token_logprobs" not in made.meta_info
    assert parse_generation(_answer()).weight_versions == [(4, 2)], "without spans"
    made = parse_generation({"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
    assert (made.finish_reason, made.weight_versions) == ("abort", [])
    assert made.tokens.shape == made.log_probs.shape == (0,)


def test_5xx_and_broken_connections_are_tried_again() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append({"auth": request.headers.get("Authorization"), **await request.json()})
        if len(seen) == 1:
            return web.Response(status=503, text="no worker")
        if len(seen) == 2:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(ANSWER)

    (answer,) = _ask(handler, _request(1), api_key="key")
    assert answer.tokens.tolist() == [97, 98] and len(seen) == 3
    assert (seen[0]["auth"], seen[0]["return_logprob"]) == ("Bearer key", True)


def test_4xx_is_an_error_at_once_and_retries_are_bounded() -> None:
    """Of each of the siblings that share a request."""
    counts = {"400": 0, "500": 0}

    async def handler(request: web.Request) -> web.StreamResponse:
        status = str((await request.json())["status"])
        counts[status] += 1
        return web.Response(status=int(status), text=f"the server's words {status}")

    errors = _ask(handler, *({"status": status} for status in counts), num_tries=3)
    for status, error in zip(counts, errors, strict=True):
        assert isinstance(error, RuntimeError) and f"/generate answered {status}: the server's words" in str(error)
    assert counts == {"400": 1, "500": 3}
    siblings = _ask(handler, *[_request(1) | {"status": 400}] * 3)
    assert all(isinstance(error, RuntimeError) and "the server's words" in str(error) for error in siblings)


def test_timeout_bounds_the_whole_request() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return web.json_response(ANSWER)

    (error,) = _ask(handler, _request(1), timeout_s=0.3)
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize("ids", [[0, 512], [-1], np.array([512])])
def test_requests_that_would_harm_an_engine_are_refused(ids: Any) -> None:
    client = GenerateClient("http://127.0.0.1:1", vocab_size=512)
    with pytest.raises(ValueError, match=r"0\.\.511"):
        asyncio.run(client.generate({"input_ids": ids}))
    with pytest.raises(ValueError, match="one request a sample"):
        asyncio.run(client.generate({"sampling_params": {"n": 2}}))


def test_abort_all_passes_over_the_dead_and_names_those_that_refuse(caplog: pytest.LogCaptureFixture) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if len(bodies) == 5:
            await asyncio.sleep(0.6)  # a hung engine
        return web.Response(status=200 if len(bodies) != 4 else 500, text="no")

    async def use(url: str) -> None:
        await abort_all([url, "http://127.0.0.1:1", url])
        assert "http://127.0.0.1:1" in caplog.text
        await abort_all([url])
        with pytest.raises(RuntimeError, match=f"abort_request failed: {url}.*500"):
            await abort_all([url])
        await abort_all([url], timeout_s=0.2)

    _serve(handler, use, "/abort_request")
    assert bodies == [{"abort_all": True}] * 5


def test_short_siblings_share_a_request_and_long_ones_do_not() -> None:
    """Eight samples of one prompt in one turn of the loop: one request, each sample its own answer."""
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count, ids = body["sampling_params"]["max_new_tokens"], body["input_ids"]
        seen.append(ids)
        if not isinstance(ids[0], list):
            return web.json_response(_answer_of(count))
        return web.json_response([_answer_of(count) for _ in ids])

    short = [_request(1, 2, count=5)] * 8 + [_request(3, count=4), _request(1, 2, count=6)]
    answers = _ask(handler, *short, *[_request(1, 2, count=1000)] * 2)
    assert [len(answer.tokens) for answer in answers] == [5] * 8 + [4, 6, 1000, 1000]
    assert sorted(seen, key=str) == sorted([[[1, 2]] * 8, [3], [1, 2], [1, 2], [1, 2]], key=str)


@pytest.mark.parametrize("adds_seeds", [True, False])
def test_siblings_whose_seeds_follow_one_another_share_a_request(adds_seeds: bool) -> None:
    """The request has the first one's seed. A request with another seed goes alone, as do all to engines that would
    give the same seed to each prompt."""
    seen: list[tuple[int | None, int]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, seed = body["input_ids"], body["sampling_params"].get("sampling_seed")
        count = len(ids) if isinstance(ids[0], list) else 1
        seen.append((seed, count))
        answers = [_answer(prompt_tokens=(seed or 0) + i) for i in range(count)]
        return web.json_response(answers if isinstance(ids[0], list) else answers[0])

    seeds = [70, 71, 72, 72, 90, 91, None, None]
    requests = [_request(1, 2) for _ in seeds]
    for request, seed in zip(requests, seeds, strict=True):
        request["sampling_params"] |= {} if seed is None else {"sampling_seed": seed}
    answers = _ask(handler, *requests, adds_seeds=adds_seeds)
    assert [answer.prompt_tokens for answer in answers[:6]] == seeds[:6], "each has the answer to its seed"
    alone = [(70, 1), (71, 1), (72, 1), (72, 1), (90, 1), (91, 1)]
    shared = [(70, 3), (72, 1), (90, 2)]
    assert sorted(seen, key=str) == sorted([*(shared if adds_seeds else alone), (None, 2)], key=str)


def _answer_of(count: int) -> dict[str, Any]:
    logprobs = [[-0.5, 7, None]] * count
    meta = {"id": "x", "finish_reason": {"type": "length"}, "output_token_logprobs": logprobs, "weight_version": "3"}
    return {"text": "", "output_ids": [7] * count, "meta_info": {**meta, "prompt_tokens": 2, "cached_tokens": 0}}


def test_a_cancelled_sibling_leaves_the_others_their_answers() -> None:
    """The first one waits a turn of the loop for the others; they are answered also where it is cancelled then."""

    async def handler(request: web.Request) -> web.StreamResponse:
        ids = (await request.json())["input_ids"]
        return web.json_response([_answer_of(2) for _ in ids] if isinstance(ids[0], list) else _answer_of(2))

    async def use(url: str) -> list[Any]:
        async with GenerateClient(url, None, 30.0, 64) as client:
            tasks = [asyncio.create_task(client.generate(_request(1))) for _ in range(3)]
            asyncio.get_running_loop().call_soon(tasks[0].cancel)  # after each has begun
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    first, *others = _serve(handler, use)
    assert isinstance(first, asyncio.CancelledError) and [len(answer.tokens) for answer in others] == [2, 2]


@pytest.mark.parametrize("pause_s", [0.0, 0.3], ids=["at once", "later"])
@pytest.mark.parametrize("prompts", [[1], [1, 1], [1, 2, 3]], ids=["alone", "together", "more than connections"])
def test_closing_the_client_ends_what_is_under_way(prompts: list[int], pause_s: float) -> None:
    is_over = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await is_over.wait()
        raise AssertionError("nobody waits for this")

    async def use(url: str) -> list[Any]:
        client = GenerateClient(url, None, 30.0, max_connections=1)
        tasks = [asyncio.create_task(client.generate(_request(prompt))) for prompt in prompts]
        await asyncio.sleep(pause_s)
        await client.close()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        is_over.set()
        assert client._session is None, "it was opened again"
        return ended

    assert all(isinstance(error, RuntimeError) for error in _serve(handler, use))


def test_a_routing_key_goes_along_and_keeps_requests_apart() -> None:
    """Requests that name their sessions are not put into one, which has one engine."""
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get(ROUTING_KEY))
        await request.json()
        return web.json_response(_answer_of(1))

    async def use(url: str) -> None:
        async with GenerateClient(url) as client:
            ask = _request(1, 2, count=1)
            await asyncio.gather(*(client.generate(dict(ask), routing_key=key) for key in ("a", "a", "b")))
            await client.generate(ask)

    _serve(handler, use)
    assert sorted(seen[:3]) == ["a", "a", "b"] and seen[3:] == [None]
