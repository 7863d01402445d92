"""Real engines that serve adapters: their log-probs are those of merged weights, and each request has one version."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.engines.engine import EngineActor
from fusionrl.models.adapters import PEFT_PREFIX, AdapterSpec, adapter_rules
from fusionrl.models.shape import ModelShape, read_model_shape
from fusionrl.plan.adapters import target_modules
from fusionrl.weights.adapters import engine_files
from tests.engines.real_engine import log_probs, real_engine
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
            "max_loras_per_batch": 2 * len(names) + 1,
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

    def assert_serves(self, names: list[str | None], versions: list[str]) -> None:
        """The prompts as one batch, each with its own adapter, have the log-probs of these versions."""
        answers = self.ask(input_ids=PROMPTS, logprob_start_len=0, lora_path=names)
        for prompt, answer, version in zip(PROMPTS, answers, versions, strict=True):
            info = answer["meta_info"]
            found = [entry[0] for entry in (*info["input_token_logprobs"][1:], *info["output_token_logprobs"])]
            wanted = log_probs(self.models[version], [*prompt, *answer["output_ids"]], 1)
            np.testing.assert_allclose(found, wanted, atol=5e-6)
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
    served: Served = started("qwen3", SPEC, "policy", "math")
    return served


def test_two_adapters_and_the_base_in_one_batch(two: Served) -> None:
    two.assert_serves(["policy", "math", "base", "policy"], ["base"] * 4)
    two.push(1, "policy", "math")
    two.assert_serves(["policy", "math", "base", "policy"], ["policy@1", "math@1", "base", "policy@1"])
    two.push(2, "policy")
    two.assert_serves(["policy", "math", "base", "math"], ["policy@2", "math@1", "base", "math@1"])
    assert two.engine.weight_version() == "2"


FAMILIES = {
    "qwen3_moe": ("q_proj", "v_proj"),  # SGLang joins them with k_proj, which has none here
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_merged_weights(family: str, started: Any) -> None:
    served = started(family, AdapterSpec(rank=4, alpha=8, targets=FAMILIES[family]))
    served.push(1, "policy")
    served.assert_serves([None] * 4, ["policy@1"] * 4)


def test_two_ranks_widen_the_adapter_of_an_mlp(started: Any) -> None:
    """24 columns for each of two ranks, which SGLang widens to 32."""
    served = started("qwen3", SPEC, tp_size=2)
    served.push(1, "policy")
    served.assert_serves([None] * 4, ["policy@1"] * 4)
