"""Real engines that serve adapters: their log-probs are those of merged weights, and each request has one version."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.engines.adapter_versions import NO_ROOM
from fusionrl.engines.engine import EngineActor
from fusionrl.engines.http import EndpointError
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.models.trainable import PEFT_PREFIX, AdapterSpec, adapter_rules
from fusionrl.plan.trained_parts import target_modules
from fusionrl.weights.adapters import engine_files
from tests.engines.real_engine import log_probs, real_engine
from tests.own_process import wait_until
from tests.tiny_model import make_byte_tokenizer
from tests.trainer import hf_models

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
PROMPTS = [[5, 9, 33, 77, 100, 20], list(range(30, 70)), [7, 8, 9], [3, 150] * 8]
SPEC = AdapterSpec(rank=4, alpha=8, use_rslora=True)


def random_adapter(shape: ModelShape, spec: AdapterSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: size for rule in adapter_rules(shape, spec).values() for name, size in rule.hf.items()}
    return {name: 0.2 * torch.randn(size, generator=generator) for name, size in sizes.items()}


@torch.no_grad()
def merged(model: torch.nn.Module, adapter: dict[str, torch.Tensor], spec: AdapterSpec) -> torch.nn.Module:
    """Transformers' model with W + scale · B A in place of each W that has an adapter."""
    result = copy.deepcopy(model)
    weights = dict(result.named_parameters())
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += spec.scale * adapter[name.replace("lora_A", "lora_B")] @ a
    return result


class Served:
    """An engine with adapters, and transformers' models of each of its versions."""

    def __init__(self, folder: Path, family: str, spec: AdapterSpec, *names: str, tp_size: int = 1, **sizes: Any):
        self.base: torch.nn.Module = hf_models.make(folder / "model", family, False, vocab_size=320, **sizes)
        make_byte_tokenizer().save_pretrained(folder / "model")
        self.shape, self.spec = read_model_shape(folder / "model"), spec
        args = {
            "enable_lora": True,
            "lora_backend": "torch_native",
            "max_lora_rank": spec.rank,
            "max_loras_per_batch": 3 * len(names) + 1,
            "lora_target_modules": sorted(target_modules(self.shape, spec)),
        }
        self.engine = real_engine(folder / "model", folder, tp_size=tp_size, **args)
        self.engine.spec = replace(self.engine.spec, adapters=names)
        self.models: dict[str, torch.nn.Module] = {"base": self.base}

    def push(self, version: int, *names: str, timeout_s: float = 60.0) -> None:
        adapters = {name: random_adapter(self.shape, self.spec, 100 * version + len(name)) for name in names}
        files = {name: engine_files(a.items(), self.spec, self.shape, "float32") for name, a in adapters.items()}
        self.engine.load_adapters(version, files, timeout_s)
        self.models |= {f"{name}@{version}": merged(self.base, a, self.spec) for name, a in adapters.items()}

    def ask(self, num_tokens: int = 6, **payload: Any) -> Any:
        params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        return self.engine._call("POST", "/generate", {"sampling_params": params, "return_logprob": True, **payload})

    def loaded(self) -> set[str]:
        """The versions that the server has, as its list of models shows them."""
        models: Any = self.engine._call("GET", "/v1/models")
        return {model["id"] for model in models["data"] if "@" in model["id"]}

    def assert_serves(self, names: list[str | None], versions: list[str]) -> None:
        """The prompts as one batch, each with its own adapter, have the log-probs of these versions."""
        answers = self.ask(input_ids=PROMPTS, logprob_start_len=0, lora_path=names)
        for prompt, answer, version in zip(PROMPTS, answers, versions, strict=True):
            info = answer["meta_info"]
            found = [entry[0] for entry in (*info["input_token_logprobs"][1:], *info["output_token_logprobs"])]
            wanted = log_probs(self.models[version], [*prompt, *answer["output_ids"]], 1)
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            if version != "base":
                assert info["weight_version"] == version.partition("@")[2]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, forked_engines: None) -> Iterator[Any]:
    engines: list[EngineActor] = []

    def start(family: str, spec: AdapterSpec = SPEC, *names: str, **options: Any) -> Served:
        served = Served(tmp_path_factory.mktemp(family), family, spec, *(names or ("policy",)), **options)
        engines.append(served.engine)
        served.engine.start()
        return served

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def two(started: Any) -> Served:
    """An engine with two adapters."""
    served: Served = started("qwen3", SPEC, "policy", "math", max_position_embeddings=2048)
    return served


def _settle(served: Served, *versions: str) -> None:
    """Wait until the server has these versions alone."""
    deadline = time.monotonic() + 20
    while served.loaded() != set(versions):
        assert time.monotonic() < deadline, served.loaded()
        time.sleep(0.05)


def test_two_adapters_and_the_base_in_one_batch(two: Served) -> None:
    two.assert_serves(["policy", "math", "base", "policy"], ["base"] * 4)
    two.push(1, "policy", "math")
    two.assert_serves(["policy", "math", "base", "policy"], ["policy@1", "math@1", "base", "policy@1"])
    two.push(2, "policy")
    two.assert_serves(["policy", "math", "base", "math"], ["policy@2", "math@1", "base", "math@1"])
    assert two.engine.weight_version() == "2"
    _settle(two, "policy@2", "math@1")


def test_requests_that_run_at_a_push_keep_their_version(two: Served) -> None:
    """None is lost or stopped, each has one version to its end, and it is unloaded after the last of them."""
    two.push(3, "policy", "math")
    _settle(two, "policy@3", "math@3")
    with ThreadPoolExecutor(17) as pool:

        def ask(number: int) -> Future[Any]:
            prompt = PROMPTS[number % len(PROMPTS)]
            return pool.submit(two.ask, 400 + number, input_ids=prompt, lora_path=("policy", "math")[number % 2])

        asked = [ask(number) for number in range(16)]
        _wait_running(two, 16)  # long enough that the first still runs when a busy machine starts the last
        two.push(4, "policy", "math")
        assert not any(answer.done() for answer in asked), "they run meanwhile"
        new = ask(0).result()
        answers = [answer.result() for answer in asked]
    assert new["meta_info"]["weight_version"] == "4"
    for number, answer in enumerate(answers):
        info, prompt = answer["meta_info"], PROMPTS[number % len(PROMPTS)]
        assert info["weight_versions"] == [{"version": "3", "start": 0, "end": 400 + number}]
        name, tokens = ("policy", "math")[number % 2], [*prompt, *answer["output_ids"]]
        of_3, of_4 = (log_probs(two.models[f"{name}@{version}"], tokens, len(prompt)) for version in (3, 4))
        found = np.array([entry[0] for entry in info["output_token_logprobs"]])
        # fp32 of some thousand tokens in batches of other sizes; another version is a thousand times as far.
        assert np.abs(found - of_3).max() < 1e-4 and np.abs(found - of_4).max() > 0.1
    _settle(two, "policy@4", "math@4")


def _wait_running(served: Served, count: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        loads: Any = served.engine._call("GET", "/v1/loads?include=core")
        if loads["loads"][0]["num_running_reqs"] == count:
            return
        assert time.monotonic() < deadline, loads
        time.sleep(0.01)


def test_a_push_waits_for_room(two: Served) -> None:
    """Requests of older versions take all slots; when they have ended, or are aborted, a load continues."""
    for name in ("math", "policy"):
        two.push(14, name)
    _settle(two, "policy@14", "math@14")
    with ThreadPoolExecutor(6) as pool:
        asked = []
        for version in (15, 16, 17, 18):  # version 14 is still loaded
            # As many tokens as the model has positions: about a minute, unless aborted.
            asked.append(pool.submit(two.ask, 2000, input_ids=PROMPTS[0], lora_path="policy"))
            _wait_running(two, len(asked))
            two.push(version, "policy")
        with pytest.raises(EndpointError, match=NO_ROOM):
            two.push(19, "policy", timeout_s=0.3)
        assert two.ask(2, input_ids=PROMPTS[0], lora_path="policy")["meta_info"]["weight_version"] == "18"
        older = pool.submit(two.push, 19, "policy")  # of trainers that die
        scratch: Any = two.engine._scratch
        wait_until(lambda: list(Path(scratch.name).glob("policy-19-*")))
        waiting = pool.submit(two.push, 19, "policy")
        with pytest.raises(RuntimeError, match="another push of adapters replaces"):
            older.result(30)
        assert not waiting.done()
        two.engine._call("POST", "/abort_request", {"abort_all": True})
        waiting.result()
        stamps = [answer.result()["meta_info"]["weight_version"] for answer in asked]
    assert stamps == ["14", "15", "16", "17"]
    _settle(two, "policy@19", "math@14")


def test_what_a_server_refuses(two: Served) -> None:
    """An unknown adapter, a request that names none of several, and a load that fails: the version before stays."""
    for payload, text in (({"lora_path": "poetry"}, "no such adapter"), ({}, "lora_path is missing")):
        with pytest.raises(EndpointError, match=text) as refused:
            two.ask(input_ids=PROMPTS[0], **payload)
        assert refused.value.status == 400
    wide = AdapterSpec(rank=8, alpha=8)
    files = engine_files(random_adapter(two.shape, wide, 1).items(), wide, two.shape, "float32")
    for names in ("policy", "poetry"):
        with pytest.raises(EndpointError, match="incompatible|not NAME@VERSION"):
            two.engine.load_adapters(10, {names: files}, 5.0)
    current = two.ask(2, input_ids=PROMPTS[0], lora_path="policy")["meta_info"]["weight_version"]
    two.push(int(current), "policy")  # again, as a push does that failed elsewhere
    two.assert_serves(["policy"] * 4, [f"policy@{current}"] * 4)


def test_openai_s_requests_name_adapters(two: Served) -> None:
    """By their model, and batches of prompts with several samples each."""
    two.push(11, "policy")
    chat = {"messages": [{"role": "user", "content": "2+2"}], "max_tokens": 3}
    answer: Any = two.engine._call("POST", "/v1/chat/completions", {**chat, "model": "any:policy"})
    assert answer["metadata"]["weight_version"] == "11"
    params = {"max_new_tokens": 3, "n": 2}
    answers: Any = two.engine._call(
        "POST", "/generate", {"input_ids": PROMPTS, "sampling_params": params, "lora_path": "policy"}
    )
    assert [answer["meta_info"]["weight_version"] for answer in answers] == ["11"] * 2 * len(PROMPTS)
    two.push(12, "policy")
    _settle(two, "policy@12", "math@14")


FAMILIES = {
    "qwen3_moe": ("q_proj", "v_proj"),  # SGLang joins them with k_proj, which has none here
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_merged_weights(family: str, started: Any) -> None:
    served = started(family, AdapterSpec(rank=4, alpha=8, targets=FAMILIES[family]))
    served.push(1, "policy")
    served.assert_serves([None] * 4, ["policy@1"] * 4)


def test_two_ranks(started: Any) -> None:
    """Each has 24 columns of an MLP, which SGLang widens to 32; both have read a folder before it goes."""
    served = started("qwen3", SPEC, tp_size=2)
    for version in range(1, 6):
        served.push(version, "policy")
    served.assert_serves([None] * 4, ["policy@5"] * 4)
