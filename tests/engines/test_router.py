"""The real router: before engines that die or hang, with and without a key, and where engines prefill or decode."""

import asyncio
import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import web

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.http import call, post
from fusionrl.engines.router import Router
from tests.engines.streaming import Engine, serve

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]

KEY = "a key of the test"
PROMPT = [1, 2, 3]
TOKENS = list(range(97, 109))


@pytest.fixture(scope="module", params=["round_robin", "manual"])
def sharing_router(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Policies that share eight requests out evenly; "manual" keeps each session on its engine."""
    flags = {"policy": request.param, "assignment_mode": "min_group"}
    yield from _running(tmp_path_factory.mktemp("router"), router_args=flags)


def _running(folder: Path, **options: Any) -> Iterator[Router]:
    router = Router("127.0.0.1", str(folder), **options)
    router.start()
    yield router
    router.shutdown()


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_an_engine_that_is_taken_out_loses_no_request(sharing_router: Router, fault: str, is_streaming: bool) -> None:
    """Eight sessions on two engines; all requests of one engine stick, then it is taken out and ended, as the driver
    does. Each is answered in full by the other one, a session's next request as well."""
    router, engines = sharing_router, [Engine(TOKENS, len(PROMPT)) for _ in range(2)]

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


@pytest.fixture
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Router]:
    """A router with the arguments that the test is parametrized by."""
    yield from _running(tmp_path, **request.param)


@pytest.mark.parametrize("router", [{"api_key": KEY}], indirect=True)
def test_what_is_refused_is_explained(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    """A client without the key sees a bare 401; the log says how many, and what to send."""
    for headers in ({}, {"Authorization": "Bearer another"}):
        answer = requests.post(f"{router.url}/generate", json={"text": "x"}, headers=headers, timeout=30)
        assert (answer.status_code, answer.text) == (401, "")
    with caplog.at_level(logging.WARNING):
        router.warn_of_refusals()
        router.warn_of_refusals()
    (said,) = (record.getMessage() for record in caplog.records)
    assert "answered 401 to 2 requests" in said
    assert all(word in said for word in ("Authorization: Bearer", "args.api_key", "FUSIONRL_ROUTER_KEY"))
    with pytest.raises(RuntimeError, match=r"answered 401: .*Authorization: Bearer KEY.*--router-api-key none"):
        asyncio.run(post(f"{router.url}/generate", {"text": "x"}))
    assert KEY not in caplog.text


@pytest.mark.parametrize("router", [{}], indirect=True)
def test_a_router_without_a_key_lets_any_client_in(router: Router) -> None:
    """The engine behind it keeps its key, which the router sends."""
    payload = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}

    async def use(url: str) -> None:
        await asyncio.to_thread(router.add_worker, url, KEY)
        for key in (None, "of my own", KEY):
            async with GenerateClient(router.url, key) as client:
                assert (await client.generate(payload)).tokens.tolist() == TOKENS[:3]
        with pytest.raises(RuntimeError, match="answered 401"):
            async with GenerateClient(url) as client:
                await client.generate(payload)

    serve(Engine(TOKENS, 2, api_key=KEY), use)
    assert router.num_refused() == 0


class Half(Engine):
    """An engine that prefills or decodes: a few lines, as SGLang moves keys and values between GPUs alone."""

    def __init__(self, mode: str, bootstrap_port: int | None = None) -> None:
        super().__init__(TOKENS, num_prompt=2)
        self.facts = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": bootstrap_port}

    async def info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.facts)


PAIRS = {"router_args": {"pd_disaggregation": True}}


@pytest.mark.parametrize("router", [PAIRS], indirect=True)
def test_each_request_goes_to_a_pair_that_meets_at_the_prefiller_s_port(router: Router) -> None:
    """Engines come and go as in a run: the router starts without any."""
    prefill, decode = Half("prefill", 4321), Half("decode")

    async def use(*urls: str) -> Any:
        for url in urls:
            await asyncio.to_thread(router.add_worker, url)
        async with GenerateClient(router.url, None, 60.0, 4) as client:
            payload = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}
            answer = await client.generate(payload)
        for url in urls:
            await asyncio.to_thread(router.remove_worker, url)
        return answer

    answer = serve(prefill, use, decode)
    assert answer.tokens.tolist() == TOKENS and answer.weight_versions == [(7, 12)]
    (first,), (second,) = prefill.asked, decode.asked
    assert first["bootstrap_port"] == second["bootstrap_port"] == 4321
    assert first["bootstrap_host"] == second["bootstrap_host"] == "127.0.0.1"
    assert first["bootstrap_room"] == second["bootstrap_room"] is not None
    assert first["input_ids"] == second["input_ids"] == [1, 2]
    assert router.workers() == []


@pytest.mark.parametrize("router", [PAIRS], indirect=True)
def test_an_engine_that_does_neither_is_refused(router: Router) -> None:
    async def use(url: str) -> None:
        with pytest.raises(RuntimeError, match="disaggregation_mode is 'null'; the router pairs"):
            await asyncio.to_thread(router.add_worker, url)

    serve(Half("null"), use)


def test_each_port_is_reserved_where_it_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests by the node's address, metrics by the loopback's, where another process may have the same number."""
    hosts: list[str] = []
    monkeypatch.setattr("fusionrl.engines.router.start_on_free_ports", lambda asked, *_: hosts.extend(asked))
    Router("192.0.2.1", str(tmp_path)).start()
    assert hosts == ["192.0.2.1", "127.0.0.1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_router_that_dies_or_hangs_is_back_at_its_address(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request under way is answered; an engine that was taken out stays out, and the counters continue."""
    monkeypatch.setattr("fusionrl.engines.router._HANGS_S", 1.0)
    deaths, router = list[RuntimeError](), Router("127.0.0.1", str(tmp_path))
    engine, gone = Engine(TOKENS, len(PROMPT), faults=[("status", 503), ("hang", 0)]), Engine(TOKENS, len(PROMPT))
    router.start()

    async def use(*urls: str) -> None:
        for url in urls:
            await asyncio.to_thread(router.add_worker, url)
        await asyncio.to_thread(router.remove_worker, gone.url)
        async with GenerateClient(router.url, None, 60.0, 4) as client:
            asking = asyncio.create_task(
                client.generate({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}})
            )
            while len(engine.asked) < 2:
                await asyncio.sleep(0.01)
            before = await asyncio.to_thread(router.num_retries)
            assert router._process is not None and before == 1 and router.find_fault() is None
            address, pid = router.url, router._process.pid
            os.kill(pid, number)
            if number == signal.SIGKILL:
                assert await asyncio.to_thread(router._process.wait_exit, 10.0)
                with pytest.raises(
                    RuntimeError, match=r"supervision of the router at \S+: the process ended \(killed by"
                ):
                    await asyncio.to_thread(router.check_alive)  # it may not be started again
                assert "killed by SIGKILL" in str(router.find_fault())
            router._on_death = deaths.append
            await asyncio.to_thread(router.check_alive)
            assert (await asking).tokens.tolist() == TOKENS[:4]
        assert router.url == address and router._process.pid != pid
        assert [worker["url"] for worker in await asyncio.to_thread(router.workers)] == [engine.url]
        assert await asyncio.to_thread(router.num_retries) >= before

    try:
        serve(engine, use, gone)
    finally:
        router.shutdown()
    (death,) = deaths
    assert ("does not answer" if number == signal.SIGSTOP else "killed by SIGKILL") in str(death)
    assert gone.asked == []


def test_a_router_that_dies_in_a_call_of_the_run_is_back_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = list[RuntimeError]()
    router = Router("127.0.0.1", str(tmp_path), on_death=deaths.append)
    engine, second = Engine(TOKENS, len(PROMPT)), Engine(TOKENS, len(PROMPT))
    router.start()

    def dies(method: str, url: str, *rest: Any, **more: Any) -> object:
        if url.endswith("/workers") and method in methods:
            methods.remove(method)
            assert router._process is not None
            os.kill(router._process.pid, signal.SIGKILL)
        return call(method, url, *rest, **more)

    async def use(*urls: str) -> None:
        for url in urls:
            await asyncio.to_thread(router.add_worker, url)
        listed = await asyncio.to_thread(router.workers)
        assert sorted(str(worker["url"]) for worker in listed) == sorted([engine.url, second.url])

    methods = ["POST", "GET"]
    monkeypatch.setattr("fusionrl.engines.router.call", dies)
    try:
        serve(engine, use, second)
    finally:
        router.shutdown()
    assert len(deaths) == 2 and methods == []


def test_an_engine_that_a_new_router_does_not_take_at_once_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router("127.0.0.1", str(tmp_path), on_death=lambda death: None)
    engine = Engine(TOKENS, len(PROMPT))
    router.start()
    register = router._register

    def refuses_once(url: str, api_key: str | None) -> None:
        monkeypatch.setattr(router, "_register", register)
        raise RuntimeError("it does not answer")

    async def use(url: str) -> None:
        await asyncio.to_thread(router.add_worker, url)
        monkeypatch.setattr(router, "_register", refuses_once)
        assert router._process is not None
        os.kill(router._process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(router._process.wait_exit, 10.0)
        assert await asyncio.to_thread(router.workers) == []
        await asyncio.to_thread(router.check_alive)
        async with GenerateClient(router.url, None, 60.0, 4) as client:
            answer = await client.generate({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}})
        assert answer.tokens.tolist() == TOKENS[:4]

    try:
        serve(engine, use)
    finally:
        router.shutdown()
