"""The real router where one engine prefills and another decodes. The engines are a few lines: SGLang moves keys and
values between GPUs alone."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.router import Router

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]

TOKENS = [5, 6, 7]


class Half:
    """An engine that prefills or decodes, and notes what it was asked."""

    def __init__(self, mode: str, bootstrap_port: int | None = None) -> None:
        self.facts = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": bootstrap_port}
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/health", self._info)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{port}"
        return runner

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.facts)

    async def _generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        meta = {"finish_reason": {"type": "length"}, "weight_version": "3", "prompt_tokens": 2, "cached_tokens": 0}
        entries = [[-0.5, token, None] for token in TOKENS]
        meta |= {"output_token_logprobs": entries, "completion_tokens": len(TOKENS)}
        return web.json_response({"text": "", "output_ids": TOKENS, "meta_info": meta})


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router("127.0.0.1", str(tmp_path), router_args={"pd_disaggregation": True})
    made.start()
    yield made
    made.shutdown()


def test_each_request_goes_to_a_pair_that_meets_at_the_prefiller_s_port(router: Router) -> None:
    """Engines come and go as in a run: the router starts without any."""
    prefill, decode = Half("prefill", 4321), Half("decode")

    async def run() -> Any:
        runners = [await half.start() for half in (prefill, decode)]
        try:
            for half in (prefill, decode):
                await asyncio.to_thread(router.add_worker, half.url)
            async with GenerateClient(router.url, None, 60.0, 4) as client:
                payload = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
                return await client.generate(payload)
        finally:
            for half, runner in zip((prefill, decode), runners, strict=True):
                await asyncio.to_thread(router.remove_worker, half.url)
                await runner.cleanup()

    answer = asyncio.run(run())
    assert answer.tokens.tolist() == TOKENS and answer.weight_versions == [(3, 3)]
    (first,), (second,) = prefill.asked, decode.asked
    assert first["bootstrap_port"] == second["bootstrap_port"] == 4321
    assert first["bootstrap_host"] == second["bootstrap_host"] == "127.0.0.1"
    assert first["bootstrap_room"] == second["bootstrap_room"] is not None
    assert first["input_ids"] == second["input_ids"] == [1, 2]
    assert router.workers() == []


def test_an_engine_that_does_neither_is_refused(router: Router) -> None:
    whole = Half("null")

    async def run() -> None:
        runner = await whole.start()
        try:
            with pytest.raises(RuntimeError, match="disaggregation_mode is 'null'; the router pairs"):
                await asyncio.to_thread(router.add_worker, whole.url)
        finally:
            await runner.cleanup()

    asyncio.run(run())
