"""The real router before engines that die or hang: what is tried again reaches another one, and nothing is lost."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.router import Router
from tests.engines.streaming import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]

PROMPT = [1, 2, 3]
TOKENS = list(range(97, 109))


@pytest.fixture(scope="module", params=["round_robin", "manual"])
def router(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Policies that share eight requests out evenly; "manual" keeps each session on its engine."""
    flags = {"policy": request.param, "assignment_mode": "min_group"}
    router = Router("127.0.0.1", str(tmp_path_factory.mktemp("router")), router_args=flags)
    router.start()
    yield router
    router.shutdown()


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_an_engine_that_is_taken_out_loses_no_request(router: Router, fault: str, is_streaming: bool) -> None:
    """Eight sessions on two engines; all requests of one engine stick, then it is taken out and ended, as the driver
    does. Each is answered in full by the other one, a session's next request as well."""
    engines = [Engine(TOKENS, len(PROMPT)) for _ in range(2)]

    async def run() -> tuple[list[Any], list[Any], Any]:
        runners = [await engine.start() for engine in engines]
        try:
            for engine in engines:
                await asyncio.to_thread(router.add_worker, engine.url)
            bad, good = engines
            bad.faults = [(fault, 5 if is_streaming else 0)] * 100
            async with GenerateClient(router.url, None, 60.0, 16, stream_responses=is_streaming) as client:
                payload = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": len(TOKENS)}}
                asks = [asyncio.create_task(client.generate(payload, f"session {i}")) for i in range(8)]
                while not bad.asked or len(bad.asked) + len(good.asked) < 8:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(router.remove_worker, bad.url)
                await runners[0].cleanup()  # its connections break
                first = await asyncio.gather(*asks)
                asked = len(bad.asked)
                second = await asyncio.gather(*(client.generate(payload, f"session {i}") for i in range(8)))
                assert len(bad.asked) == asked
                return first, second, client
        finally:
            for engine, runner in zip(engines, runners, strict=True):
                await asyncio.to_thread(router.remove_worker, engine.url)
                await runner.cleanup()

    before = router.num_retries()
    first, second, client = asyncio.run(run())
    for answer in first + second:
        assert answer.tokens.tolist() == TOKENS
        assert answer.log_probs.tolist() == [engines[0].log_prob(i) for i in range(len(TOKENS))]
        assert sum(count for _, count in answer.weight_versions) == len(TOKENS)
    assert client.num_retries + router.num_retries() - before > 0
    continued = sum(answer.part - 1 for answer in first)  # one may meet the bad engine again before it is out
    begun = dict[str | None, int]()  # with how many tokens of its answer a session's last request came
    for engine in engines:
        for key, asked in zip(engine.keys, engine.asked, strict=True):
            begun[key] = max(begun.get(key, 0), len(asked["input_ids"]) - len(PROMPT))
    assert client.num_tokens_kept == sum(begun.values()) <= 5 * continued
    assert (continued > 0) == is_streaming
