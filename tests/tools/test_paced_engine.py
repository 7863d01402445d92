"""tools/bench/paced_engine.py: SGLang's protocol, as our client and the router use it, without a model."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineControl
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


def test_answers_have_a_tenth_of_the_modelled_tokens() -> None:
    """Or as many as the request allows; a stream brings the same in pieces."""

    async def use(engines: dict[str, PacedEngine]) -> None:
        (url,) = engines
        async with GenerateClient(url, vocab_size=64) as client:
            answers = [await client.generate({"input_ids": [1, 2], "sampling_params": MANY}) for _ in range(3)]
            short = await client.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 20}})
        async with GenerateClient(url, stream_responses=True) as client:
            pieces = [piece async for piece in client.stream({"input_ids": [1], "sampling_params": MANY})]
        assert all(60 < len(answer.tokens) == len(answer.log_probs) < 160 for answer in answers)
        assert len({len(answer.tokens) for answer in answers}) > 1
        assert {answer.finish_reason for answer in answers} == {"stop"}
        assert [answer.weight_versions for answer in answers] == [[(0, len(answer.tokens))] for answer in answers]
        assert len(short.tokens) == 20 and short.finish_reason == "length"
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
