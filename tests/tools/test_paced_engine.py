"""tools/bench/paced_engine.py: SGLang's protocol, as our client and the router use it, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.engines.client import GenerateClient, abort_all
from fusionrl.engines.control import EngineControl
from fusionrl.engines.router import Router
from tools.bench.engine_model import Machine
from tools.bench.lengths import Lengths
from tools.bench.paced_engine import PacedEngine, Scale, start_engines

FAST = Scale(time=0.001, tokens=0.1)
MANY = {"max_new_tokens": 2_000}
Use = Callable[[dict[str, PacedEngine]], Awaitable[Any]]


def with_engines(use: Use, count: int = 1, median: float = 1_000.0, scale: Scale = FAST) -> Any:
    """Run `use` with engines in this event loop."""

    async def run() -> Any:
        lengths = Lengths(median=median, sigma=0.1, longest=15_000)
        return await use(await start_engines(count, Machine(), scale, lengths))

    return asyncio.run(run())


def test_an_answer_has_a_tenth_of_the_modelled_tokens() -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        async with GenerateClient(next(iter(engines)), vocab_size=64) as client:
            answers = [await client.generate({"input_ids": [1, 2], "sampling_params": MANY}) for _ in range(3)]
        assert all(60 < len(answer.tokens) == len(answer.log_probs) < 160 for answer in answers)
        assert len({len(answer.tokens) for answer in answers}) > 1
        assert {answer.finish_reason for answer in answers} == {"stop"}
        assert [answer.weight_versions for answer in answers] == [[(0, len(answer.tokens))] for answer in answers]

    with_engines(use)


def test_the_limit_of_a_request_holds() -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        async with GenerateClient(next(iter(engines))) as client:
            answer = await client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 20}})
        assert len(answer.tokens) == 20 and answer.finish_reason == "length"

    with_engines(use)


def test_a_stream_brings_the_same_tokens() -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        async with GenerateClient(next(iter(engines)), stream_responses=True) as client:
            request = {"input_ids": [1], "sampling_params": MANY}
            pieces = [piece async for piece in client.stream(request)]
        assert len(pieces) > 2 and pieces[-1].finish_reason == "stop"
        assert 60 < sum(len(piece.tokens) for piece in pieces) < 160

    with_engines(use, scale=Scale(time=0.02, tokens=0.1))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_push_goes_into_an_answer(mode: str) -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        url, engine = next(iter(engines.items()))
        control = EngineControl(url, 1, None)
        async with GenerateClient(url) as client:
            task = asyncio.create_task(client.generate({"input_ids": [1], "sampling_params": MANY}))
            while engine.batch.num_sampled < 300:
                await asyncio.sleep(0.01)
                engine.now()
            await asyncio.to_thread(control.pause, mode)
            await asyncio.to_thread(control.update_weights_from_disk, "nowhere", "7")
            has = engine.batch.num_sampled
            await asyncio.sleep(0.05)
            assert not task.done() and engine.report()["tokens"] == has
            await asyncio.to_thread(control.resume)
            answer = await task
        assert [version for version, _ in answer.weight_versions] == [0, 7]
        assert await asyncio.to_thread(control.weight_version) == "7"
        assert (engine.report()["tokens_prefilled_again"] > 0) == (mode == "retract")

    with_engines(use, scale=Scale(time=0.05, tokens=0.1))


def test_abort_answers_and_a_broken_connection_frees() -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        url, engine = next(iter(engines.items()))
        async with GenerateClient(url) as client:
            request = {"input_ids": [1], "sampling_params": MANY}
            first, second = (asyncio.create_task(client.generate(request)) for _ in range(2))
            while engine.report()["in_flight"] < 2:
                await asyncio.sleep(0.01)
            second.cancel()
            while engine.report()["in_flight"] > 1:
                await asyncio.sleep(0.01)
            assert len(engine.batch.running) == 1
            await abort_all([url])
            assert (await first).finish_reason == "abort"
        assert engine.report()["aborted"] == 1 and not engine.batch.running

    with_engines(use, scale=Scale(time=1.0, tokens=0.1))


@pytest.mark.engine
def test_the_real_router_takes_them(tmp_path: Path) -> None:
    async def use(engines: dict[str, PacedEngine]) -> None:
        router = Router("127.0.0.1", str(tmp_path))
        try:
            await asyncio.to_thread(router.start)
            await asyncio.gather(*(asyncio.to_thread(router.add_worker, url) for url in engines))
            async with GenerateClient(router.url) as client:
                requests = [{"input_ids": [number, 9, 9], "sampling_params": MANY} for number in range(8)]
                answers = await asyncio.gather(*map(client.generate, requests))
            assert all(len(answer.tokens) > 1 for answer in answers)
            assert sum(engine.num_ended for engine in engines.values()) == 8
            assert all(engine.num_ended for engine in engines.values())
        finally:
            await asyncio.to_thread(router.shutdown)

    with_engines(use, count=2)
