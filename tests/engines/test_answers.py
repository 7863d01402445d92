"""Answers of engines that no engine should give: refused in one place, asked once more elsewhere, never trained on."""

import asyncio
import base64
import resource
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from fusionrl.engines.answers import (
    AnswerBounds,
    AnswerError,
    input_log_probs,
    log_probs,
    parse_answer,
    parse_score,
    routed_experts,
)
from fusionrl.engines.client import GenerateClient
from tests.engines.answer_mutations import GOOD, HARMLESS, MAX_NEW_TOKENS, MUTATIONS, VOCAB_SIZE, compressed
from tests.engines.streaming import NUMBER
from tests.engines.streaming import serve_all as serve

PAYLOAD = {"input_ids": [1, 2], "return_logprob": True, "sampling_params": {"max_new_tokens": MAX_NEW_TOKENS}}
ASKED = AnswerBounds.by(PAYLOAD, VOCAB_SIZE)


def test_an_answer_that_is_wrong_is_refused_in_one_message() -> None:
    for _, wrong, answer in MUTATIONS:
        with pytest.raises(AnswerError) as raised:
            parse_answer(answer, ASKED)
        message = str(raised.value)
        assert len(message) < 400 and "\n" not in message, wrong
        assert message.startswith(("output_ids", "meta_info", "text", "the body")), (wrong, message)


def test_an_answer_that_can_be_trained_on_is_taken() -> None:
    for name, answer in HARMLESS:
        (generation,) = parse_answer(answer, ASKED)
        counts = [len(generation.tokens), len(generation.log_probs), sum(n for _, n in generation.weight_versions)]
        assert len(set(counts)) == 1, name


def _respond(request: web.Request, body: bytes, is_stream: bool) -> web.Response:
    if is_stream:
        return web.Response(body=b"data: " + body + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")
    return web.Response(body=body, content_type="application/json")


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_wrong_answer_is_asked_for_once_more_at_another_engine(is_stream: bool) -> None:
    """One engine of two errs, each time in another way: the samples are those of the good one."""
    wrong: list[bytes] = []
    asked_of: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        asked_of.append(request.app[NUMBER])
        return _respond(request, wrong[0] if request.app[NUMBER] == 0 else orjson.dumps(GOOD), is_stream)

    async def use(urls: list[str]) -> None:
        async with GenerateClient(
            urls[0], None, 30.0, vocab_size=VOCAB_SIZE, engine_urls=urls, stream_responses=is_stream, num_tries=1
        ) as client:
            for _, name, body in MUTATIONS:
                if is_stream and not body:  # no event at all
                    continue
                wrong[:], asked_of[:] = [body], []
                found = await client.generate(PAYLOAD)
                assert found.tokens.tolist() == [97, 98, 99], name
                assert found.log_probs.tolist() == [-0.5, -1.25, 0.0], name
                assert asked_of == [0, 1], name
            assert client.num_answers_refused >= 40

    serve(answer, use)


def test_the_second_wrong_answer_ends_the_request_and_names_the_engine_and_the_field() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return _respond(request, MUTATIONS[-1][2], is_stream=False)

    async def use(urls: list[str]) -> None:
        async with GenerateClient("http://127.0.0.1:9", None, 30.0, worker_urls=urls) as client:
            with pytest.raises(AnswerError, match=r"http://127.*/generate: .*meta_info\.weight_version"):
                await client.generate(PAYLOAD)
            assert client.num_answers_refused == 2

    serve(answer, use)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": [{"version": "2", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"weight_versions": None, "weight_version": "2"},
    ],
    ids=str,
)
def test_an_answer_of_older_weights_than_were_pushed_is_refused(changes: dict[str, Any], is_stream: bool) -> None:
    """As of an engine that another user has started again: another one is asked, and named if it is stale, too."""
    stale = orjson.dumps(GOOD | {"meta_info": GOOD["meta_info"] | changes})
    asked_of: list[int] = []
    least: list[int | None] = [3]

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        asked_of.append(request.app[NUMBER])
        return _respond(request, stale if request.app[NUMBER] == 0 else orjson.dumps(GOOD), is_stream)

    async def use(urls: list[str]) -> None:
        settings: Any = {"engine_urls": urls, "stream_responses": is_stream, "least_version": lambda: least[0]}
        async with GenerateClient(urls[0], None, 30.0, **settings) as client:
            assert (await client.generate(PAYLOAD)).weight_versions == [(3, 1), (4, 2)]
            assert asked_of == [0, 1]
            least[0] = 4
            with pytest.raises(AnswerError, match=r"http://127.*is 3, and version 4 was pushed before the request"):
                await client.generate(PAYLOAD)
            least[0] = None  # nothing was pushed
            assert (await client.generate(PAYLOAD)).weight_versions[0][0] in (2, "default")

    serve(answer, use)


def test_siblings_of_one_request_get_as_many_answers_as_they_are() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        count = len((await request.json())["input_ids"]) - (request.app[NUMBER] == 0)
        return web.json_response([GOOD] * count)

    async def use(urls: list[str]) -> Any:
        async with GenerateClient(urls[0], None, 30.0, engine_urls=urls) as client:
            found = await asyncio.gather(*(client.generate(PAYLOAD) for _ in range(5)))
            assert client.num_answers_refused == 1
            return [one.tokens.tolist() for one in found]

    assert serve(answer, use) == [[97, 98, 99]] * 5


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", ["compressed", "endless", "long"])
def test_a_body_of_600_mb_never_gets_into_memory(kind: str, is_stream: bool) -> None:
    packed = compressed() if kind == "compressed" else b""
    served = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal served
        await request.read()
        if request.app[NUMBER] == 1:
            return _respond(request, orjson.dumps(GOOD), is_stream)
        if kind == "compressed":
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        response = web.StreamResponse()
        if kind == "long":
            response.content_length = 600 << 20
        await response.prepare(request)
        for _ in range(600):
            await response.write(b" " * (1 << 20))
            served += 1
        return response

    async def use(urls: list[str]) -> Any:
        async with GenerateClient(urls[0], None, 60.0, engine_urls=urls, stream_responses=is_stream) as client:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = await client.generate(PAYLOAD)
            assert client.num_answers_refused == 1
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 100 << 10, f"{grown >> 10} MB"  # ru_maxrss is in KB
            return found.tokens.tolist()

    assert serve(answer, use) == [97, 98, 99]
    assert served < 300


def test_log_probs_at_the_edge() -> None:
    """Also where float32 has no number between the value and the bound."""
    for value in (0.001, -1e5, 0.0, -0.0):
        assert log_probs([-1.0, value], "f")[-1] == np.float32(value)
    for value in (0.002, -1e5 - 1, 0.0010000001, -100000.001):
        with pytest.raises(AnswerError, match=str(value)):
            log_probs([-1.0, value], "f")


def test_log_probs_of_what_was_read_experts_and_scores() -> None:
    entries = [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]]
    assert input_log_probs({"input_token_logprobs": entries}, 2).tolist() == [-0.5, -0.25]
    for wrong in ({}, {"input_token_logprobs": None}, {"input_token_logprobs": entries[1:]}):
        with pytest.raises(AnswerError, match=r"input_token_logprobs"):
            input_log_probs(wrong, 3)
    with pytest.raises(AnswerError, match="not a finite number"):
        input_log_probs({"input_token_logprobs": entries}, 3)
    chosen = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    meta = {"routed_experts": base64.b64encode(chosen.tobytes()).decode()}
    assert np.array_equal(routed_experts(meta, (2, 3, 2), 12), chosen)
    with pytest.raises(AnswerError, match=r"0\.\.10"):
        routed_experts(meta, (2, 3, 2), 11)
    for data in (None, "@@@", meta["routed_experts"][:8], 7):
        with pytest.raises(AnswerError, match="routed_experts"):
            routed_experts({"routed_experts": data}, (2, 3, 2), None)
    assert parse_score({"embedding": [0.5]}) == 0.5
    for wrong_score in (None, [], {}, {"embedding": []}, {"embedding": ["a"]}, {"embedding": [float("nan")]}):
        with pytest.raises(AnswerError, match="not a finite score"):
            parse_score(wrong_score)


def test_behind_a_router_engines_are_tried_in_turn_and_dead_ones_passed_by() -> None:
    """Nobody knows which engine answered through the router: the bad one may be asked again, but not it alone."""
    asked_of: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        number = request.app[NUMBER]
        asked_of.append(number)
        is_bad = number in (0, 1)  # the router, which asks engine 1, and engine 1
        return _respond(request, b"{}" if is_bad else orjson.dumps(GOOD), is_stream=False)

    async def use(urls: list[str]) -> None:
        engines = [urls[1], "http://127.0.0.1:9", urls[2]]
        async with GenerateClient(urls[0], None, 30.0, engine_urls=engines) as client:
            for _ in range(6):
                assert (await client.generate(PAYLOAD)).tokens.tolist() == [97, 98, 99]

    serve(answer, use, num_engines=3)
    assert asked_of.count(2) == 6


def test_the_text_of_a_refused_stream_is_bounded() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=400, body=b"xx\n" * (14 << 20))

    async def use(urls: list[str]) -> None:
        async with GenerateClient(urls[0], None, 30.0, stream_responses=True) as client:
            with pytest.raises(RuntimeError, match="answered 400: xx") as caught:
                await client.generate(PAYLOAD)
            assert len(str(caught.value)) < 3000

    serve(answer, use, num_engines=1)


@pytest.mark.parametrize("line", [b"x" * 4095 + b"\n", b'data: {"meta_info": {"completion_tokens": 0}}\n\n' * 100])
def test_a_stream_without_tokens_ends(line: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(20_000):
            await response.write(line)
        return response

    async def use(urls: list[str]) -> None:
        async with GenerateClient(urls[0], None, 60.0, stream_responses=True) as client:
            with pytest.raises(AnswerError, match="the body"):
                await client.generate(PAYLOAD)

    serve(answer, use, num_engines=1)
