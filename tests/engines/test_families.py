"""Real engines with a tiny model of each kind of layers: their log-probs are transformers', also after an update."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.engines.engine import EngineActor
from fusionrl.engines.spec import LOADER
from fusionrl.engines.weight_payload import SharedBuffer, by_value
from fusionrl.models.shape import read_model_shape
from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums
from tests.engines.real_engine import log_probs, real_engine
from tests.tiny_model import make_byte_tokenizer, make_tiny_qwen3
from tests.trainer import hf_models

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
DELTA = hf_models.HYBRID | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
SCALED = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
# One of each kind of layers; `tools/family_loops.py` runs all families. What differs from the sizes of
# `tests/trainer/hf_models.py`; config.json is as transformers saves it.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 1},  # SGLang does not read it
    "deepseek_v3": {},
    "glm_moe_dsa": {"index_topk": 128},  # no text here is longer: served as DeepSeek-V3
    "qwen3_5_text": DELTA,
    "gemma3_text": {"rope_parameters": SCALED | {"full_attention": LINEAR}},
    "gpt_oss": {},
}
PROMPTS = [[5, 9, 33, 77, 100, 20], list(range(30, 100)), [7, 8, 9], list(range(200, 240)), [3, 250] * 8]


def make_model(family: str, folder: Path, seed: int = 0) -> torch.nn.Module:
    """Save a random model of transformers' own class with a tokenizer, as the folder of an engine."""
    is_tied = family == "gemma3_text"  # SGLang leaves out the output layer of one that is not
    values = {"vocab_size": 320} | MODELS.get(family, {})
    model: torch.nn.Module = hf_models.make(folder, family, is_tied, seed=seed, **values)
    make_byte_tokenizer().save_pretrained(folder)
    return model


def answers(engine: EngineActor, num_tokens: int = 8) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """(tokens of prompt and answer, log-probs of the prompt's but the first, of the answer's) of `PROMPTS` at once."""
    params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    payload = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    found: Any = engine._call("POST", "/generate", payload)
    rows = []
    for prompt, one in zip(PROMPTS, found, strict=True):
        info = one["meta_info"]
        read, made = info["input_token_logprobs"], info["output_token_logprobs"]
        rows.append(([*prompt, *one["output_ids"]], np.array([x[0] for x in read[1:]]), np.array([x[0] for x in made])))
    return rows


def assert_serves(engine: EngineActor, model: torch.nn.Module, bound: float) -> None:
    for ids, read, made in answers(engine):
        np.testing.assert_allclose(np.concatenate([read, made]), log_probs(model, ids, 1), atol=bound)


@pytest.fixture
def started(tmp_path: Path, forked_engines: None) -> Iterator[Any]:
    """started(folder) -> an engine that serves it."""
    engines: list[EngineActor] = []

    def start(folder: Path, **server_args: Any) -> EngineActor:
        engines.append(real_engine(folder, tmp_path, **server_args))
        engines[-1].start()
        return engines[-1]

    yield start
    for one in engines:
        one.shutdown()


@pytest.mark.parametrize("family", MODELS)
def test_log_probs_are_those_of_transformers(family: str, started: Any, tmp_path: Path) -> None:
    """Of prompts and answers together in a batch, of a prompt that the cache knows, and after an update in memory."""
    first, second = (make_model(family, tmp_path / str(seed), seed) for seed in range(2))
    bound = read_model_shape(tmp_path / "0").logit_bound
    engine = started(tmp_path / "0")
    assert_serves(engine, first, bound)
    assert_serves(engine, first, bound)
    from safetensors.torch import load_file

    engine.begin_weight_update()
    payload = by_value(list(load_file(tmp_path / "1" / "model.safetensors").items()))
    engine.update_weights_from_tensor([payload], load_format=None, version="1", flush_cache=True)
    engine.end_weight_update()
    assert_serves(engine, second, bound)


def test_two_ranks_share_the_memory_of_a_push(started: Any, tmp_path: Path) -> None:
    """Each takes its part of stacks of experts, and leaves what the others read as it is."""
    from safetensors.torch import load_file

    first, second = (make_model("gpt_oss", tmp_path / str(seed), seed) for seed in range(2))
    engine = started(tmp_path / "0", tp_size=2)
    assert_serves(engine, first, 1e-5)
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    shared = SharedBuffer(sum(tensor.nbytes for tensor in tensors.values()))
    parts = shared.flat.split([tensor.nbytes for tensor in tensors.values()])
    named = [
        (name, part.view(torch.float32).view(tensor.shape))
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    ]
    for (_, view), tensor in zip(named, tensors.values(), strict=True):
        view.copy_(tensor)
    engine.begin_weight_update()
    payloads = [shared.payload(named)] * 2
    engine.update_weights_from_tensor(payloads, load_format=LOADER, version="1", flush_cache=True)
    engine.end_weight_update()
    assert all(torch.equal(view, tensors[name]) for name, view in named)
    want = engine_checksums(tensors.items(), read_model_shape(tmp_path / "1"), 2, mlp_multiple=CPU_MULTIPLE)
    assert engine.weight_checksums() == want
    assert_serves(engine, second, 1e-5)


def test_the_text_part_of_a_published_model(started: Any, tmp_path: Path) -> None:
    """From its files, also a later version of them."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 4, "layer_types": DELTA["layer_types"]}
    models = [
        hf_models.make_published(tmp_path / str(seed), "qwen3_5_moe_text", False, seed=seed, **sizes)
        for seed in range(2)
    ]
    for seed in range(2):
        make_byte_tokenizer().save_pretrained(tmp_path / str(seed) / "published")
    engine = started(tmp_path / "0" / "published")
    assert_serves(engine, models[0], 3e-5)
    engine.update_weights_from_disk(str(tmp_path / "1" / "published"), version="1")
    assert_serves(engine, models[1], 3e-5)


def test_an_engine_does_not_start_with_weights_of_other_names(started: Any, tmp_path: Path) -> None:
    """Of a model that sees pictures, say, whose text part has a prefix. SGLang's Llama warns of each, and serves."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    make_model("llama", folder)
    file = folder / "model.safetensors"
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="SGLang has found no weights of .* matrices, the first model.layers.0"):
        started(folder)


def test_an_engine_does_not_start_with_another_rotary_base(started: Any, tmp_path: Path) -> None:
    """It reads a field that trainers do not read, or the other way round: here a user has given one of them a value.

    So too one that has no weights yet, and gets them by a push.
    """
    folder = make_tiny_qwen3(tmp_path / "model")
    override = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})
    with pytest.raises(RuntimeError, match="SGLang reads rope_theta 77 where trainers read 10000"):
        started(folder, json_model_override_args=override, load_format="dummy")


def test_drafts_of_latent_attention(started: Any, tmp_path: Path) -> None:
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("SGLang compiles its table of n-grams")
    model = make_model("deepseek_v3", tmp_path / "model")
    engine = started(tmp_path / "model", speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    assert_serves(engine, model, 1e-5)
