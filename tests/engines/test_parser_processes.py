"""Long answers are parsed in helper processes: the same arrays, whatever becomes of the processes."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
import psutil
import pytest

from fusionrl.engines import parser_processes as parsers_module
from fusionrl.engines.answers import LONG_BYTES, AnswerError
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.parser_processes import START_AFTER, ParserProcesses
from tests.engines.long_answers import make_answer

LONG = 4096
ANSWERS = [make_answer(number, LONG + number) for number in range(24)]


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

    result = asyncio.run(scene())
    assert _helpers() == []
    return result


def _helpers(pid: int | None = None) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children() if "fusionrl.engines.parser_processes" in p.cmdline()]


def test_long_answers_come_back_whole() -> None:
    async def use(parsers: ParserProcesses) -> list[Any]:
        found = await asyncio.gather(*(parsers.parse(body) for _, _, body in ANSWERS))
        assert 1 <= len(_helpers()) <= 4
        return found

    for (tokens, log_probs, body), (generation,) in zip(ANSWERS, _run(use), strict=True):
        assert generation.tokens.dtype == np.int32 and generation.log_probs.dtype == np.float32
        assert np.array_equal(generation.tokens, tokens)
        assert np.array_equal(generation.log_probs, log_probs), "bit for bit"
        assert generation.text == orjson.loads(body)["text"]
        assert generation.weight_versions == [(1, len(tokens))]
        generation.tokens[0] = 0  # writable, as arrays of a short answer are


def test_few_long_answers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client belongs to one rollout: processes for each that had a few long answers took longer than these."""
    body = ANSWERS[0][2]

    async def use(parsers: ParserProcesses) -> None:
        monkeypatch.setattr(parsers_module, "START_AFTER", START_AFTER)
        for _ in range(START_AFTER // len(body)):
            await parsers.parse(body)
        assert not _helpers()
        await parsers.parse(body)
        assert _helpers()

    _run(use)


@pytest.mark.parametrize("mishap", ["killed helpers", "callers that give up"])
def test_mishaps_cost_no_answer_and_mix_nothing_up(mishap: str) -> None:
    async def use(parsers: ParserProcesses) -> None:
        await parsers.parse(ANSWERS[0][2])
        asks = [asyncio.create_task(parsers.parse(body)) for _, _, body in ANSWERS]
        await asyncio.sleep(0)  # all have been sent what they may have
        lost = asks[::2] if mishap == "callers that give up" else []
        for going in lost or _helpers():
            going.cancel() if isinstance(going, asyncio.Task) else going.kill()
        await asyncio.gather(*asks, return_exceptions=True)
        for (tokens, _, _), ask in zip(ANSWERS, asks, strict=True):
            assert ask.cancelled() if ask in lost else np.array_equal(ask.result()[0].tokens, tokens)

    _run(use)


def test_what_is_wrong_with_a_long_answer_is_said_as_of_a_short_one() -> None:
    answer = orjson.loads(ANSWERS[0][2])
    answer["output_ids"][7] += 1

    async def use(parsers: ParserProcesses) -> None:
        with pytest.raises(AnswerError, match="log-probs of other tokens"):
            await parsers.parse(orjson.dumps(answer))
        with pytest.raises(AnswerError, match="not JSON"):
            await parsers.parse(b"[" * LONG_BYTES)
        assert len(_helpers()) > 0, "a bad answer costs no helper"

    _run(use)


OWNER = """
import asyncio
from fusionrl.engines import parser_processes as module
from tests.engines.long_answers import make_answer

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
        owner.kill()
    deadline = time.monotonic() + 20
    while any(p.is_running() and p.status() != "zombie" for p in helpers):
        assert time.monotonic() < deadline, helpers
        time.sleep(0.05)
    assert helpers


def test_a_client_that_is_closed_leaves_none_behind() -> None:
    async def scene() -> None:
        async with GenerateClient("http://127.0.0.1:9") as client:
            client._parsers = ParserProcesses()
            await client._parsers.parse(ANSWERS[0][2])
            assert _helpers()
        assert not _helpers()

    asyncio.run(scene())
