"""GenerateClient against a small server that fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fusionrl.engines.client import ROUTING_KEY, GenerateClient, abort_all
from fusionrl.engines.generation import parse_generation

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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _serve(handler: Handler, use: Callable[[str], Awaitable[Any]], path: str = "/generate") -> Any:
    """Run `use(url)` while a server answers `path` with `handler`."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_post(path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0]
            return await use(f"http://{host}:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def _answer(**meta: Any) -> dict[str, Any]:
    return {**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}}


def test_arrays_and_versions() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "warm", "start": 1, "end": 2}]
    generation = parse_generation(_answer(weight_versions=spans))
    assert generation.tokens.dtype == np.int32
    assert generation.tokens.tolist() == [97, 98]
    assert generation.log_probs.dtype == np.float32
    assert generation.log_probs.tolist() == [-0.5, -1.25]
    assert generation.weight_versions == [(4, 1), ("warm", 1)]
    assert (generation.finish_reason, generation.prompt_tokens, generation.cached_tokens) == ("length", 3, 1)
    assert "output_token_logprobs" not in generation.meta_info


def test_a_server_without_spans_and_an_aborted_empty_answer() -> None:
    assert parse_generation(_answer()).weight_versions == [(4, 2)]
    empty = {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}
    generation = parse_generation(empty)
    assert generation.finish_reason == "abort"
    assert generation.tokens.shape == generation.log_probs.shape == (0,)
    assert generation.weight_versions == []


def test_answers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="log-probs of other tokens"):
        parse_generation({**_answer(), "output_ids": [97]})
    with pytest.raises(RuntimeError, match="do not cover"):
        parse_generation(_answer(weight_versions=[{"version": "1", "start": 0, "end": 1}]))


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

    async def use(url: str) -> Any:
        async with GenerateClient(url, "key", 30.0, 4) as client:
            return await client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})

    assert _serve(handler, use).tokens.tolist() == [97, 98]
    assert len(seen) == 3
    assert seen[0]["auth"] == "Bearer key"
    assert seen[0]["return_logprob"] is True


def test_4xx_is_an_error_at_once_and_retries_are_bounded() -> None:
    counts = {"400": 0, "500": 0}

    async def handler(request: web.Request) -> web.StreamResponse:
        status = str((await request.json())["status"])
        counts[status] += 1
        return web.Response(status=int(status), text=f"the server's words {status}")

    async def use(url: str) -> None:
        async with GenerateClient(url, None, 60.0, 4, num_tries=3) as client:
            for status in counts:
                with pytest.raises(RuntimeError, match=f"/generate answered {status}: the server's words"):
                    await client.generate({"status": status})

    _serve(handler, use)
    assert counts == {"400": 1, "500": 3}


def test_timeout_bounds_the_whole_request() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(2)
        return web.json_response(ANSWER)

    async def use(url: str) -> None:
        async with GenerateClient(url, None, 0.3, 4) as client:
            with pytest.raises(TimeoutError):
                await client.generate({"input_ids": [1]})

    _serve(handler, use)


def test_several_samples_in_one_request_are_refused() -> None:
    client = GenerateClient("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="one request a sample"):
        asyncio.run(client.generate({"sampling_params": {"n": 2}}))


@pytest.mark.parametrize("ids", [[0, 512], [-1], np.array([512])])
def test_tokens_outside_the_vocabulary_are_refused(ids: Any) -> None:
    client = GenerateClient("http://127.0.0.1:1", vocab_size=512)
    with pytest.raises(ValueError, match=r"0\.\.511"):
        asyncio.run(client.generate({"input_ids": ids}))


def test_abort_all_passes_over_the_dead_and_names_those_that_refuse(caplog: pytest.LogCaptureFixture) -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if len(bodies) == 5:
            await asyncio.sleep(2)  # a hung engine
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

    async def use(url: str) -> list[list[int]]:
        async with GenerateClient(url, None, 30.0, 64) as client:

            def ask(prompt: list[int], count: int) -> Any:
                return client.generate({"input_ids": prompt, "sampling_params": {"max_new_tokens": count}})

            short = [ask([1, 2], 5) for _ in range(8)] + [ask([3], 4), ask([1, 2], 6)]
            long = [ask([1, 2], 1000), ask([1, 2], 1000)]
            return [len(answer.tokens) for answer in await asyncio.gather(*short, *long)]

    assert _serve(handler, use) == [5] * 8 + [4, 6, 1000, 1000]
    assert sorted(seen, key=str) == sorted([[[1, 2]] * 8, [3], [1, 2], [1, 2], [1, 2]], key=str)


def _answer_of(count: int) -> dict[str, Any]:
    logprobs = [[-0.5, 7, None]] * count
    meta = {"id": "x", "finish_reason": {"type": "length"}, "output_token_logprobs": logprobs, "weight_version": "3"}
    return {"text": "", "output_ids": [7] * count, "meta_info": {**meta, "prompt_tokens": 2, "cached_tokens": 0}}


def test_a_failed_shared_request_fails_every_sibling() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="no such thing")

    async def use(url: str) -> list[Any]:
        async with GenerateClient(url, None, 30.0, 64) as client:
            asks = [client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}) for _ in range(3)]
            return await asyncio.gather(*asks, return_exceptions=True)

    results = _serve(handler, use)
    assert len(results) == 3
    assert all(isinstance(r, RuntimeError) and "no such thing" in str(r) for r in results)


def test_a_cancelled_sibling_leaves_the_others_their_answers() -> None:
    """The first one waits a turn of the loop for the others; they are answered also where it is cancelled then."""

    async def handler(request: web.Request) -> web.StreamResponse:
        ids = (await request.json())["input_ids"]
        return web.json_response([_answer_of(2) for _ in ids] if isinstance(ids[0], list) else _answer_of(2))

    async def use(url: str) -> list[Any]:
        async with GenerateClient(url, None, 30.0, 64) as client:
            request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
            tasks = [asyncio.create_task(client.generate(request)) for _ in range(3)]
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
        client, params = GenerateClient(url, None, 30.0, max_connections=1), {"max_new_tokens": 2}
        requests = [{"input_ids": [prompt], "sampling_params": params} for prompt in prompts]
        tasks = [asyncio.create_task(client.generate(request)) for request in requests]
        await asyncio.sleep(pause_s)
        await client.close()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        is_over.set()
        assert client._session is None, "it was opened again"
        return ended

    assert all(isinstance(error, RuntimeError) for error in _serve(handler, use))


def test_a_routing_key_goes_along_and_keeps_requests_apart() -> None:
    """RequestMerger that name their sessions are not put into one request, which has one engine."""
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get(ROUTING_KEY))
        await request.json()
        return web.json_response(_answer_of(1))

    async def use(url: str) -> None:
        async with GenerateClient(url.removesuffix("/generate")) as client:
            ask = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
            await asyncio.gather(*(client.generate(dict(ask), routing_key=key) for key in ("a", "a", "b")))
            await client.generate(ask)

    _serve(handler, use)
    assert sorted(seen[:3]) == ["a", "a", "b"] and seen[3:] == [None]
