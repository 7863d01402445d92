"""Long answers are parsed in helper processes: the same arrays, whatever becomes of the processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
from aiohttp import web

from fusionrl.engines import parser_processes as parsers_module
from fusionrl.engines.answer_checks import AnswerError
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.parser_processes import LONG_BYTES, START_AFTER, ParserProcesses
from tests.buffer.answer_server import make_answer

LONG = 4096
SHORT = 16


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first long answer starts the processes."""
    monkeypatch.setattr(parsers_module, "START_AFTER", 0)


def _run(use: Callable[[ParserProcesses], Awaitable[Any]]) -> Any:
    async def scene() -> Any:
        parsers = ParserProcesses()
        try:
            return await use(parsers)
        finally:
            await parsers.close()

    return asyncio.run(scene())


def _helpers(pid: int | None = None) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children() if "fusionrl.engines.parse_worker" in p.cmdline()]


def test_long_answers_come_back_whole_and_no_process_stays() -> None:
    answers = [make_answer(number, LONG + number) for number in range(12)]
    assert len(answers[0][2]) > LONG_BYTES

    async def use(parsers: ParserProcesses) -> list[Any]:
        found = await asyncio.gather(*(parsers.parse(body) for _, _, body in answers))
        assert 1 <= len(_helpers()) <= 4
        return found

    for (tokens, log_probs, body), (generation,) in zip(answers, _run(use), strict=True):
        assert generation.tokens.dtype == np.int32 and generation.log_probs.dtype == np.float32
        assert np.array_equal(generation.tokens, tokens)
        assert np.array_equal(generation.log_probs, log_probs), "bit for bit"
        assert generation.text == orjson.loads(body)["text"]
        assert generation.weight_versions == [(1, len(tokens))]
        assert generation.finish_reason == "length" and "output_token_logprobs" not in generation.meta_info
        generation.tokens[0] = 0  # writable, as arrays of a short answer are
    assert _helpers() == []


def test_short_answers_start_no_process() -> None:
    body = make_answer(0, SHORT)[2]

    async def use(parsers: ParserProcesses) -> list[psutil.Process]:
        assert len((await parsers.parse(body))[0].tokens) == SHORT
        return _helpers()

    assert _run(use) == []


def test_few_long_answers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client belongs to one rollout: processes for each that had a few long answers took longer than these."""
    monkeypatch.setattr(parsers_module, "START_AFTER", START_AFTER)
    tokens, _, body = make_answer(0, LONG)

    async def use(parsers: ParserProcesses) -> tuple[int, list[psutil.Process]]:
        num_parsed = 0
        while not (helpers := _helpers()) and num_parsed <= START_AFTER // len(body) + 1:
            assert np.array_equal((await parsers.parse(body))[0].tokens, tokens)
            num_parsed += 1
        return num_parsed, helpers

    num_parsed, helpers = _run(use)
    assert num_parsed == START_AFTER // len(body) + 1 and len(helpers) > 0


def test_killed_helpers_cost_no_answer() -> None:
    answers = [make_answer(number, LONG) for number in range(40)]

    async def use(parsers: ParserProcesses) -> list[Any]:
        await parsers.parse(answers[0][2])
        asks = [asyncio.create_task(parsers.parse(body)) for _, _, body in answers]
        await asyncio.sleep(0)  # all have been sent what they may have
        for helper in _helpers():
            helper.kill()
        return await asyncio.gather(*asks)

    for (tokens, _, _), (generation,) in zip(answers, _run(use), strict=True):
        assert np.array_equal(generation.tokens, tokens)


def test_callers_that_give_up_mix_nothing_up() -> None:
    answers = [make_answer(number, LONG) for number in range(24)]

    async def use(parsers: ParserProcesses) -> list[Any]:
        asks = [asyncio.create_task(parsers.parse(body)) for _, _, body in answers]
        await asyncio.sleep(0.05)
        for ask in asks[::2]:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        return [await ask for ask in asks[1::2]]

    for (tokens, _, _), (generation,) in zip(answers[1::2], _run(use), strict=True):
        assert np.array_equal(generation.tokens, tokens)


def test_what_is_wrong_with_a_long_answer_is_said_as_of_a_short_one() -> None:
    answer = orjson.loads(make_answer(0, LONG)[2])
    answer["output_ids"][7] += 1

    async def use(parsers: ParserProcesses) -> None:
        with pytest.raises(RuntimeError, match="log-probs of other tokens"):
            await parsers.parse(orjson.dumps(answer))
        with pytest.raises(AnswerError, match="not JSON"):
            await parsers.parse(b"[" * LONG_BYTES)
        assert len(_helpers()) > 0, "a bad answer costs no helper"

    _run(use)


def test_a_client_that_is_closed_leaves_none_behind() -> None:
    body = make_answer(3, LONG)[2]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def scene() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with GenerateClient(f"http://{host}:{port}") as client:
            payload = {"input_ids": [1], "sampling_params": {"max_new_tokens": LONG}}
            found = await asyncio.gather(*(client.generate(payload) for _ in range(8)))
            assert all(np.array_equal(one.tokens, make_answer(3, LONG)[0]) for one in found)
            assert _helpers()
        assert _helpers() == []
        await runner.cleanup()

    asyncio.run(scene())


OWNER = """
import asyncio, sys
from fusionrl.engines import parser_processes as module
from tests.buffer.answer_server import make_answer

async def main():
    module.START_AFTER = 0
    parsers = module.ParserProcesses()
    await parsers.parse(make_answer(0, 4096)[2])
    print("parsed", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_helpers_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "parsed\n"
        helpers = _helpers(owner.pid)
        assert helpers
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(p.is_running() and p.status() != "zombie" for p in helpers):
        time.sleep(0.05)
    assert not any(p.is_running() and p.status() != "zombie" for p in helpers)
