"""Streamed answers: pieces in order, once each, also where the engine dies on the way."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from fusionrl.engines.answers import Generation, StreamParser
from fusionrl.engines.client import GenerateClient
from tests.engines.streaming import Engine, serve

PROMPT = [1, 2, 3]
TOKENS = [ord(letter) for letter in "abcdefghij"]


def engine(*faults: tuple[str, int], **fields: Any) -> Engine:
    return Engine(TOKENS, len(PROMPT), list(faults), **fields)


def payload(**params: Any) -> dict[str, Any]:
    return {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": len(TOKENS), **params}}


def ask(served: Engine, *, key: str | None = None, timeout_s: float = 30.0, **params: Any) -> tuple[Generation, Any]:
    """The answer that a streaming client gets, and the client."""

    async def use(url: str) -> tuple[Generation, Any]:
        async with GenerateClient(url, None, timeout_s, 4, num_tries=4, stream_responses=True) as client:
            return await client.generate(payload(**params), key), client

    return serve(served, use)


def check(answer: Generation, served: Engine) -> None:
    assert answer.tokens.tolist() == TOKENS
    np.testing.assert_allclose(answer.log_probs, [served.log_prob(i) for i in range(len(TOKENS))])
    assert answer.text == "abcdefghij"
    assert sum(count for _, count in answer.weight_versions) == len(TOKENS)
    assert {version for version, _ in answer.weight_versions} == {int(served.version)}
    assert (answer.finish_reason, answer.prompt_tokens) == ("length", len(PROMPT))


def test_a_stream_gives_the_answer() -> None:
    served = engine()
    answer, client = ask(served)
    check(answer, served)
    assert answer.weight_versions == [(7, 10)] and answer.part == 1
    assert client.num_retries == client.num_tokens_kept == 0
    assert served.asked[0]["stream"] and served.asked[0]["return_logprob"]


@pytest.mark.parametrize("is_incremental", [True, False])
def test_each_piece_has_the_versions_that_its_event_tells(is_incremental: bool) -> None:
    """The weights change after five tokens, within a piece; events tell the versions of all tokens so far."""
    served, parser = engine(is_incremental=is_incremental, version="8"), StreamParser()
    pieces = []
    for first, end in ((0, 3), (3, 7), (7, 7), (7, 8)):  # then the engine dies
        event = served.event(0, first, end, is_last=False)
        spans = [{"version": "7", "start": 0, "end": min(5, end)}, {"version": "8", "start": 5, "end": end}]
        event["meta_info"]["weight_versions"] = spans[: 1 + (end > 5)]
        pieces.append(parser.parse(event))
    assert [piece.weight_versions for piece in pieces] == [[(7, 3)], [(7, 2), (8, 2)], [], [(8, 1)]]


@pytest.mark.parametrize("is_incremental", [True, False])
def test_what_a_dead_engine_sent_is_kept_and_another_goes_on(is_incremental: bool) -> None:
    """Death after four tokens, then one before its first, then after three more; the session's key goes along."""
    served = engine(("die", 4), ("die", 0), ("end", 3), is_incremental=is_incremental)
    answer, client = ask(served, key="session", min_new_tokens=6, stop_token_ids=[9])
    check(answer, served)
    assert [len(asked["input_ids"]) for asked in served.asked] == [3, 7, 7, 10]
    params = [asked["sampling_params"] for asked in served.asked]
    assert [one["max_new_tokens"] for one in params] == [10, 6, 6, 3]
    assert [one["min_new_tokens"] for one in params] == [6, 2, 2, 0]
    assert all(one["stop_token_ids"] == [9] for one in params)
    assert served.keys == ["session"] * 4
    assert (client.num_retries, client.num_tokens_kept, answer.part) == (3, 7, 3)


def test_tokens_of_other_weights_keep_their_version() -> None:
    served = engine(("die", 4))

    async def use(url: str) -> list[Generation]:
        async with GenerateClient(url, None, 30.0, 4) as client:
            pieces = []
            async for piece in client.stream(payload()):
                pieces.append(piece)
                if len(pieces) == 4:
                    served.version = "8"  # of the engine that goes on
            return pieces

    pieces = serve(served, use)
    assert [piece.part for piece in pieces] == [1] * 4 + [2] * 6
    assert [piece.weight_versions for piece in pieces] == [[(7, 1)]] * 4 + [[(8, 1)]] * 6
    assert [piece.finish_reason for piece in pieces] == [""] * 9 + ["length"]


@pytest.mark.parametrize("params", [{"stop": ["zz"]}, {"regex": "a+"}, {"repetition_penalty": 1.2}])
def test_what_looks_back_is_asked_for_as_a_whole_and_again_from_its_start(params: dict[str, Any]) -> None:
    served = engine(("die", 0))
    answer, client = ask(served, **params)
    check(answer, served)
    assert [asked.get("stream") for asked in served.asked] == [None, None]
    assert [len(asked["input_ids"]) for asked in served.asked] == [3, 3]
    assert (client.num_retries, client.num_tokens_kept) == (1, 0)


def test_refusals_within_a_stream() -> None:
    """A 4xx is the caller's mistake and final; a 5xx is tried again, a bounded number of times without a token."""
    for fault in ("error", "abort", "status"):
        served = engine((fault, 400))
        with pytest.raises(RuntimeError, match=r"/generate answered 400: (the server's words|not now)"):
            ask(served)
        served = engine((fault, 503))
        answer, client = ask(served)
        check(answer, served)
        assert client.num_retries == 1
    served = engine(*[("die", 1)] * 2, *[("die", 0)] * 10)
    with pytest.raises(RuntimeError, match="did not answer to the end"):
        ask(served)
    assert len(served.asked) == 5  # the first of four tries in vain is the second one that came further


def test_a_hanging_engine_is_bounded_by_the_time_limit() -> None:
    with pytest.raises(TimeoutError):
        ask(engine(("hang", 2)), timeout_s=0.5)


def test_leaving_the_loop_ends_the_request() -> None:
    served = engine(("hang", 5))

    async def use(url: str) -> int:
        count = 0
        async with GenerateClient(url, None, 30.0, 4) as client:
            async with aclosing(client.stream(payload())) as pieces:
                async for piece in pieces:
                    count += len(piece.tokens)
                    if count == 3:
                        break
            await asyncio.wait_for(served.left.wait(), 5)  # the engine sees that nobody waits
        return count

    assert serve(served, use) == 3


def test_kept_connections_and_long_events() -> None:
    """Answers read to their end leave the connection for the next one; an event may be longer than any buffer."""
    served = engine()
    served.tokens = [97] * 40_000
    served.is_incremental = False

    async def use(url: str) -> int:
        async with GenerateClient(url, None, 60.0, 1) as client:
            for count in (10, 20):
                async for _ in client.stream(payload(max_new_tokens=count)):
                    pass
            events = [served.event(0, 39_999, 40_000, is_last=True)]
            served.send = lambda response, event: Engine.send(served, response, events[0])  # type: ignore[method-assign]
            served.tokens = [97]  # one event
            pieces = [piece async for piece in client.stream(payload(max_new_tokens=40_000))]
            assert client._session is not None
            return len(pieces[-1].tokens)

    assert serve(served, use) == 40_000


def test_an_abort_that_repeats_what_was_sent_adds_nothing() -> None:
    """SGLang's, of a request that waits to go on after it was retracted: the last token, all text, all log-probs."""
    parser = StreamParser()
    entries = [[-1.0, 97, None], [-2.0, 98, None]]
    meta = {"id": "r", "finish_reason": None, "weight_version": "3", "completion_tokens": 2}
    first = parser.parse({"text": "ab", "output_ids": [97, 98], "meta_info": meta | {"output_token_logprobs": entries}})
    assert first.tokens.tolist() == [97, 98] and first.finish_reason == ""
    end = meta | {"output_token_logprobs": entries, "finish_reason": {"type": "abort"}}
    last = parser.parse({"text": "ab", "output_ids": [98], "meta_info": end})
    assert (last.tokens.tolist(), last.text, last.finish_reason) == ([], "", "abort")
    with pytest.raises(RuntimeError, match="where 3 of 5 tokens"):
        parser.parse({"text": "e", "output_ids": [101], "meta_info": meta | {"completion_tokens": 5}})


@pytest.mark.parametrize("stream", [False, True])
def test_engines_are_asked_past_the_router(stream: bool) -> None:
    """Requests spread over the engines, a session stays with its own, and a try that fails goes to another one."""

    engines = [Engine([97, 98, 99], 1) for _ in range(3)]

    async def use(*urls: str) -> None:
        async with GenerateClient("http://127.0.0.1:9", stream_responses=stream, worker_urls=urls) as client:
            params = {"max_new_tokens": 3, "temperature": 1.0}
            asks = [client.generate({"input_ids": [i], "sampling_params": params}) for i in range(6)]
            assert all(answer.tokens.tolist() == [97, 98, 99] for answer in await asyncio.gather(*asks))
            assert [len(engine.asked) for engine in engines] == [2, 2, 2]
            request = {"input_ids": [9], "sampling_params": params}
            for _ in range(3):
                await client.generate(request, "session")
            (own,) = [engine for engine in engines if len(engine.asked) == 5]
            own.faults = [("status", 503)]
            await client.generate(request, "session")
            assert client.num_retries == 1 and sorted(len(engine.asked) for engine in engines) == [2, 3, 6]

    serve(engines[0], use, *engines[1:])
