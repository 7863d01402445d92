"""One real SGLang server behind a real router, on a CPU: generation, control, weight updates, failures."""

import asyncio
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.answers import join
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.engines.engine import EngineActor
from fusionrl.engines.http import call
from fusionrl.engines.process import ForkedMinder
from fusionrl.engines.router import Router
from fusionrl.engines.spec import LOADER
from fusionrl.engines.weight_payload import SharedBuffer, by_value
from tests.clock import here_s
from tests.engines.real_engine import KEY, log_probs, real_engine
from tests.tiny_model import make_tiny_qwen3

# find_spec, as the import of sglang takes seconds and must not be needed here.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang_router") is None,
    reason="sglang and sglang-router are not installed",
)

PROMPT = [5, 9, 33, 77, 100, 20]


@dataclass
class Stack:
    engine: EngineActor
    router: Router
    models: list[torch.nn.Module]
    paths: list[Path]

    @property
    def pid(self) -> int:
        assert self.engine._server is not None
        return self.engine._server.pid

    def named(self, which: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self.models[which].named_parameters()]

    def log_probs(self, which: int, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
        """Reference by transformers: log-probs of `tokens` after `prompt` under model `which`."""
        return log_probs(self.models[which], [*prompt, *tokens.tolist()], len(prompt))

    def generate(self, num_tokens: int = 12, **payload: Any) -> Generation:
        async def run() -> Generation:
            async with GenerateClient(self.router.url, KEY, 120.0, 8) as client:
                params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
                return await client.generate({"input_ids": PROMPT, "sampling_params": params, **payload})

        return asyncio.run(run())

    def stream(self, has_enough: Callable[[int], bool]) -> int:
        """Ask for 1,500 tokens; end the request when `has_enough` of the number of pieces, and return the number."""

        async def run() -> int:
            count = 0
            async with GenerateClient(self.router.url, KEY, 120.0, 8) as client:
                params = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
                async with aclosing(client.stream({"input_ids": PROMPT, "sampling_params": params})) as pieces:
                    async for _ in pieces:
                        count += 1
                        if has_enough(count):
                            break
            return count

        return asyncio.run(run())

    def assert_serves(self, which: int, version: int | str) -> None:
        generation = self.generate()
        np.testing.assert_allclose(generation.log_probs, self.log_probs(which, PROMPT, generation.tokens), atol=1e-4)
        assert generation.weight_versions == [(version, 12)]
        assert self.engine.weight_version() == str(version)


@pytest.fixture(scope="module")
def stack(forked_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("engine")
    paths = [make_tiny_qwen3(folder / f"model{seed}", seed) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths]
    engine = real_engine(paths[0], folder, incremental_streaming_output=True)
    router = Router("127.0.0.1", str(folder), api_key=KEY)
    try:
        with ThreadPoolExecutor() as pool:
            for started in (pool.submit(engine.start), pool.submit(router.start)):
                started.result()
        router.add_worker(engine.url, KEY)
        yield Stack(engine, router, models, paths)
    finally:
        router.shutdown()
        engine.shutdown()


def test_generates_with_the_model_s_log_probs(stack: Stack) -> None:
    stack.assert_serves(0, 0)
    generation = stack.generate()
    assert (generation.finish_reason, generation.prompt_tokens) == ("length", len(PROMPT))
    assert generation.cached_tokens > 0  # the prompt was there already
    stack.engine.flush_cache()
    assert stack.generate().cached_tokens == 0


def test_attends_whole_batches_and_says_so(stack: Stack) -> None:
    """Requests of many lengths at once, each with the log-probs that it has alone; then again, on cached prefixes."""
    log = Path(stack.engine.spec.log_dir, "engine-0.log").read_text()
    assert "Attention backend: torch_batched" in log
    prompts = [[(7 * i + 3 * j) % 250 for j in range(1 + 5 * i)] for i in range(12)]
    for _ in range(2):
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(stack.generate, 3 + i, input_ids=prompt) for i, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, (one.result() for one in answers), strict=True):
            np.testing.assert_allclose(answer.log_probs, stack.log_probs(0, prompt, answer.tokens), atol=1e-4)


def test_seeds_decide_the_tokens_whatever_is_computed_with_them(stack: Stack) -> None:
    """Siblings by one request, each alone, and among other prompts on a cached prefix: the same tokens and log-probs,
    bit by bit."""

    def ask(prompts: Sequence[tuple[list[int], int]]) -> list[Generation]:
        params = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
        requests = [
            {"input_ids": prompt, "sampling_params": {**params, "sampling_seed": seed}} for prompt, seed in prompts
        ]

        async def run() -> list[Generation]:
            async with GenerateClient(stack.router.url, KEY, 120.0, 64) as client:
                return await asyncio.gather(*map(client.generate, requests))

        return asyncio.run(run())

    asked = [(PROMPT, seed) for seed in range(70, 76)]
    stack.engine.flush_cache()
    together = ask(asked)
    stack.engine.flush_cache()
    alone = [ask([request])[0] for request in asked]
    others = [([(7 * i + 3 * j) % 250 for j in range(3 + 9 * i)], i) for i in range(7)]
    mixed = ask([*others[:4], *asked[::-1], *others[4:]])[4:10][::-1]
    assert len({tuple(answer.tokens.tolist()) for answer in together}) == 6
    for ways in zip(together, alone, mixed, strict=True):
        assert len({answer.tokens.tobytes() for answer in ways}) == 1
        assert len({answer.log_probs.tobytes() for answer in ways}) == 1, [answer.log_probs for answer in ways]


def test_flushing_waits_for_requests_that_run(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends no server (sglang#33784, miles#1497)."""
    (scheduler,) = _schedulers(stack.engine)
    decoding, asking, refused = (threading.Event() for _ in range(3))
    paths, post = list[str](), stack.engine._post

    def noted(path: str) -> object:
        paths.append(path)
        asking.set()
        try:
            return post(path)
        finally:
            refused.set()

    def has_enough(count: int) -> bool:
        if count == 5:
            scheduler.suspend()  # until the engine is asked
            decoding.set()
        return refused.is_set()

    monkeypatch.setattr(stack.engine, "_post", noted)
    with ThreadPoolExecutor() as pool:
        streaming = pool.submit(stack.stream, has_enough)
        assert decoding.wait(60)
        flushing = pool.submit(stack.engine.flush_cache)
        assert asking.wait(60)
        scheduler.resume()
        flushing.result()
        assert streaming.result() < 1500
    assert paths == ["/flush_cache", "/flush_cache?timeout=10"]
    assert stack.generate().cached_tokens == 0


def test_on_a_cpu_the_server_s_processes_share_what_they_import(stack: Stack) -> None:
    """And it is a fork of the nursery, as in a run; else the suite takes minutes longer."""
    server = psutil.Process(stack.pid)
    children = {p.pid: " ".join(p.cmdline()) for p in server.children(recursive=True)}
    assert len(children) >= 2, "a scheduler and a detokenizer"
    assert not any("spawn_main" in command for command in children.values()), children
    assert stack.engine._server is not None and isinstance(stack.engine._server._minder, ForkedMinder)


def test_a_wrong_key_is_refused_by_router_and_engine(stack: Stack) -> None:
    payload = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}

    async def ask(url: str, key: str | None) -> None:
        async with GenerateClient(url, key, 30.0, 1) as client:
            await client.generate(payload)

    for url in (stack.router.url, stack.engine.url):
        for key in ("wrong", None):
            with pytest.raises(RuntimeError, match="/generate answered 401"):
                asyncio.run(ask(url, key))
    for path in ("/pause_generation", "/begin_weight_update", "/flush_cache"):
        with pytest.raises(RuntimeError, match=f"{path} answered 401"):
            call("POST", stack.engine.url + path, {}, api_key="wrong")


def test_a_refusal_has_endpoint_status_and_text(stack: Stack) -> None:
    with pytest.raises(RuntimeError, match="/update_weights_from_tensor answered 400: .*begin_weight_update"):
        stack.engine.update_weights_from_tensor(
            [by_value(stack.named(0))], load_format=None, version="9", flush_cache=True
        )
    with pytest.raises(RuntimeError, match="/destroy_weights_update_group answered 400"):
        stack.engine.destroy_weights_update_group("nobody")
    with pytest.raises(RuntimeError, match="/generate answered 400"):
        stack.generate(sampling_params={"temperature": -1.0})


def test_a_paused_engine_leaves_its_core_to_others(stack: Stack) -> None:
    """SGLang's own loop asks for messages without a rest; a push on a CPU needs the core."""
    decoding, resumed = threading.Event(), threading.Event()

    def has_enough(count: int) -> bool:
        decoding.set()
        return resumed.is_set()

    with ThreadPoolExecutor() as pool:
        request = pool.submit(stack.stream, has_enough)
        assert decoding.wait(60)
        stack.engine.pause("in_place")
        (scheduler,) = _schedulers(stack.engine)
        before = scheduler.cpu_times()
        time.sleep(1.0)
        after = scheduler.cpu_times()
        took = []
        for _ in range(5):
            begun = time.monotonic()
            assert call("GET", stack.engine.url + "/server_info", api_key=KEY)  # the scheduler's answer
            took.append(time.monotonic() - begun)
        # If none woke it, each but the first would take the second that it rests. A busy machine delays some, not all.
        assert min(took[1:]) < 0.5, "a message wakes it"
        stack.engine.resume()
        resumed.set()
        assert request.result(timeout=60) < 1500
    stack.engine.flush_cache()  # waits for the end of the request
    assert after.user + after.system - before.user - before.system < 0.2


def _schedulers(engine: EngineActor, name: str = "scheduler") -> list[psutil.Process]:
    assert engine._server is not None
    found = psutil.Process(engine._server.pid).children(recursive=True)
    found = [child for child in found if name in "".join(child.cmdline())]
    assert found
    return found


def _load(engine: EngineActor, key: str = "num_running_reqs") -> int:
    loads = call("GET", engine.url + "/v1/loads", api_key=KEY)["loads"]
    return sum(load[key] for load in loads)


def _wait_for_running_request(engine: EngineActor) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if _load(engine) and _load(engine, "num_used_tokens") > len(PROMPT) + 4:  # it decodes
            return
        time.sleep(0.01)
    raise AssertionError("no request is running")


def _written(shared: SharedBuffer, named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Views of the segment that hold `named`, one after another."""
    parts = zip(named, shared.flat.split([tensor.numel() * 4 for _, tensor in named]), strict=True)
    views = [(name, part.view(torch.float32).view(tensor.shape)) for (name, tensor), part in parts]
    for (_, tensor), (_, view) in zip(named, views, strict=True):
        view.copy_(tensor)
    return views


def _update(stack: Stack, payload: str, load_format: str | None, which: int, version: int) -> None:
    stack.engine.begin_weight_update()
    stack.engine.update_weights_from_tensor([payload], load_format=load_format, version=str(version), flush_cache=True)
    stack.engine.end_weight_update()
    stack.assert_serves(which, version)


def test_weights_by_shared_memory(stack: Stack) -> None:
    """An engine keeps the last segment of a slot mapped, with the values of each update, until the slot has another."""
    server = psutil.Process(stack.pid)

    def mapped(segments: Sequence[SharedBuffer]) -> list[list[str]]:
        maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in server.children(recursive=True)]
        lines = [line.split() for one in maps for line in one.splitlines() if "/memfd:fusionrl-weights" in line]
        # where the server's processes have each of them: address, rights, offset, device, inode, name
        return [[words[0] for words in lines if words[4] == str(segment.where[1])] for segment in segments]

    def update(shared: SharedBuffer, which: int, version: int) -> None:
        payload = shared.payload(_written(shared, stack.named(which)))
        assert len(payload) < 16_000 < shared.flat.numel()
        _update(stack, payload, LOADER, which, version)

    num_bytes = sum(tensor.numel() * 4 for _, tensor in stack.named(0))
    files = set(os.listdir("/dev/shm"))
    first, second, third = (SharedBuffer(num_bytes, slot) for slot in ("0.0", "0.1", "0.0"))
    update(first, 0, 20)
    update(second, 1, 21)
    places = mapped([first, second, third])
    assert [len(one) for one in places] == [1, 1, 0]
    update(first, 0, 22)
    update(second, 1, 23)
    assert mapped([first, second, third]) == places
    update(third, 0, 24)
    assert [len(one) for one in mapped([first, second, third])] == [0, 1, 1]
    assert not {name for name in set(os.listdir("/dev/shm")) - files if name.startswith("torch_")}


def test_weights_from_disk_and_memory_calls(stack: Stack) -> None:
    stack.engine.update_weights_from_disk(str(stack.paths[1]), "7")
    stack.engine.release_memory(["kv_cache"])
    stack.engine.resume_memory(["kv_cache"])
    stack.assert_serves(1, 7)


def test_a_streamed_answer_is_the_whole_one_bit_by_bit(stack: Stack) -> None:
    """Greedy, through the router, with an end by length and one by a token; and its text is that of its tokens."""

    async def ask(is_streaming: bool, params: dict[str, Any]) -> Generation:
        client = GenerateClient(stack.router.url, KEY, 120.0, 8, stream_responses=is_streaming)
        async with client:
            return await client.generate({"input_ids": PROMPT, "sampling_params": {"temperature": 0.0} | params})

    tokenizer = load_tokenizer(str(stack.paths[0]))
    first = stack.generate(100, sampling_params={"temperature": 0.0, "max_new_tokens": 100, "ignore_eos": True})
    for params in (
        {"max_new_tokens": 100, "ignore_eos": True, "skip_special_tokens": False},
        {"max_new_tokens": 100, "stop_token_ids": [int(first.tokens[60])], "no_stop_trim": True},
    ):
        answers = []
        for is_streaming in (False, True):
            stack.engine.flush_cache()  # a cached prompt is another computation, and another last bit
            answers.append(asyncio.run(ask(is_streaming, params)))
        whole, streamed = answers
        assert whole.tokens.tolist() == streamed.tokens.tolist()
        assert whole.log_probs.tobytes() == streamed.log_probs.tobytes()
        for name in ("text", "finish_reason", "weight_versions", "prompt_tokens", "cached_tokens", "part"):
            assert getattr(whole, name) == getattr(streamed, name), name
        # The tokenizer has fewer tokens than the model; SGLang shows the others as token 0.
        tokens = np.where(whole.tokens < len(tokenizer), whole.tokens, 0)
        assert tokenizer.decode(tokens, skip_special_tokens=params.get("skip_special_tokens", True)) == whole.text


def test_a_stream_goes_on_through_a_weight_update(stack: Stack) -> None:
    """Each piece tells the version of each of its tokens, also one that was under way at the update."""
    (scheduler,), (detokenizer,) = (_schedulers(stack.engine, name) for name in ("scheduler", "detokenizer"))
    decoding = threading.Event()

    async def stream() -> list[Generation]:
        pieces = []
        async with GenerateClient(stack.router.url, KEY, 120.0, 8) as client:
            params = {"max_new_tokens": 600, "temperature": 1.0, "ignore_eos": True}
            async for piece in client.stream({"input_ids": PROMPT, "sampling_params": params}):
                pieces.append(piece)
                if len(pieces) == 5:
                    scheduler.suspend()  # so that it does not end before the update, however slow this machine is
                    decoding.set()
        return pieces

    with ThreadPoolExecutor() as pool:
        request = pool.submit(lambda: asyncio.run(stream()))
        assert decoding.wait(60)
        detokenizer.suspend()  # so that tokens wait there while the weights change
        try:
            scheduler.resume()
            time.sleep(0.1)
            stack.engine.pause("retract")
            stack.engine.update_weights_from_disk(str(stack.paths[0]), "8")
        finally:
            detokenizer.resume()
        stack.engine.resume()
        pieces = request.result()
    assert len(pieces) > 100
    assert [piece.finish_reason for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
    tokens, log_probs = (np.concatenate([getattr(p, name) for p in pieces]) for name in ("tokens", "log_probs"))
    versions = np.concatenate([np.full(n, version) for piece in pieces for version, n in piece.weight_versions])
    (first, before), (second, after) = join(pieces).weight_versions
    assert (first, second, before + after, len(tokens)) == (7, 8, 600, 600)
    assert versions.tolist() == [7] * before + [8] * after
    np.testing.assert_allclose(log_probs[:before], stack.log_probs(1, PROMPT, tokens)[:before], atol=1e-4)
    np.testing.assert_allclose(log_probs[before:], stack.log_probs(0, PROMPT, tokens)[before:], atol=1e-4)
    stack.assert_serves(0, 8)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_nothing_is_answered_from_the_cache_of_weights_before(stack: Stack, mode: str) -> None:
    """A prompt whose keys and values are cached, and are in use when the weights change, is asked again afterwards.

    sglang#33783: requests that were retracted leave their prefix in the cache.
    """
    old, new, version = (0, 1, 20) if mode == "abort" else (1, 0, 21)
    prompt = np.random.default_rng(3).integers(0, 500, 300).tolist()

    def ask(num_tokens: int = 12) -> Generation:
        return stack.generate(num_tokens, input_ids=prompt)

    stack.engine.flush_cache()
    assert ask().cached_tokens == 0
    assert ask().cached_tokens > 290
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, 1500)
        _wait_for_running_request(stack.engine)
        stack.engine.pause(mode)
        stack.engine.begin_weight_update()
        payload = [by_value(stack.named(new))]
        stack.engine.update_weights_from_tensor(payload, load_format=None, version=str(version), flush_cache=True)
        stack.engine.end_weight_update()
        stack.engine.resume()
        answers = [ask(), ask()]
        stack.engine.pause("abort")
        stack.engine.resume()
        before = running.result()
    answers.append(ask())  # the request that ran has given its own back
    if mode == "abort":
        assert [answer.cached_tokens > 0 for answer in answers] == [False, True, True]
    for answer in answers:
        assert answer.weight_versions == [(version, 12)]
        want, stale = (stack.log_probs(which, prompt, answer.tokens) for which in (new, old))
        np.testing.assert_allclose(answer.log_probs, want, atol=1e-4)
        assert np.abs(want - stale).mean() > 0.1
    assert (before.finish_reason, len(before.weight_versions)) == ("abort", 1 if mode == "abort" else 2)
    assert 0 < len(before.tokens) < 1500 and len(before.log_probs) == len(before.tokens)
    assert sum(count for _, count in before.weight_versions) == len(before.tokens)


def test_only_a_token_is_waited_for_until_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that refuses its question does not get it again."""
    engine, answers = real_engine("model", tmp_path), [RuntimeError("refused"), None]

    def answer(*args: object, **options: object) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(engine, "_living", lambda purpose: None)
    monkeypatch.setattr(engine, "_call", answer)
    assert "did not answer within 30 s" in str(engine.fault(30.0, makes_tokens=False)) and len(answers) == 1
    answers[:] = [RuntimeError("refused"), None]
    assert engine.fault(30.0) is None and not answers


def test_on_a_cpu_a_server_is_not_asked_to_end(tmp_path: Path) -> None:
    """SGLang looks for SIGTERM once in 5 s; on a GPU its schedulers hold memory that they should give back."""
    asked: list[float] = []
    for device in ("cpu", "cuda"):
        engine = real_engine("model", tmp_path)
        engine.spec = replace(engine.spec, device=device, gpu_ids=(0,))
        server: Any = SimpleNamespace(terminate=lambda timeout_s: asked.append(timeout_s))
        engine._server = server
        engine.shutdown()
    assert asked == [0.0, 10.0]


def test_a_hanging_engine_is_told_from_a_busy_one(stack: Stack) -> None:
    with ThreadPoolExecutor() as pool:
        request = pool.submit(stack.generate, 1500)
        _wait_for_running_request(stack.engine)
        assert stack.engine.fault(30.0) is None
        stack.engine.pause("abort")  # its other tokens would take seconds of a core, and show nothing
        stack.engine.resume()
        assert request.result().finish_reason == "abort"
    assert stack.engine.fault(30.0) is None and stack.engine.fault(10.0, makes_tokens=False) is None
    stack.engine.pause("retract")
    assert stack.engine.fault(10.0, makes_tokens=False) is None
    stack.engine.resume()
    schedulers = [process.pid for process in _schedulers(stack.engine)]
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert "made no token within 1 s (--rollout-health-check-timeout)" in str(stack.engine.fault(1.0))
    assert 1.0 <= time.monotonic() - begin < here_s(8)
    assert "did not answer within 1 s (--rollout-health-check-tim" in str(stack.engine.fault(1.0, makes_tokens=False))
    for pid in schedulers:
        os.kill(pid, signal.SIGCONT)
    assert stack.engine.fault(30.0) is None
    stack.assert_serves(0, 21)


def test_a_server_that_cannot_start_ends_with_its_log(tmp_path: Path) -> None:
    model = tmp_path / "nothing here"
    model.mkdir()  # a server of what is no folder is no fork: it may look at the hub
    engine = real_engine(model, tmp_path)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        engine.start()
    assert time.monotonic() - begin < 60
    message = str(error.value)
    assert "start of engine 0" in message
    assert "nothing here" in message.partition("the end of it:")[2]
    assert str(tmp_path / "engine-0.log") in message


def test_a_killed_server_is_reported(stack: Stack) -> None:
    """Last: it ends the engine of this module."""
    pid = stack.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="killed by SIGKILL(.|\n)*engine-0.log"):  # noqa: PT012, raised in a while
        while time.monotonic() < deadline:
            stack.engine.check_alive()
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    with pytest.raises(RuntimeError, match="killed by SIGKILL"):
        stack.engine.flush_cache()
    left = stack.engine._shared_memory.copy()
    assert left
    stack.engine.shutdown()
    assert not any(path.exists() for path in left)
