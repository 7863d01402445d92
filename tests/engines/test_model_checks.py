"""What is looked at of an engine's model before it serves. Whole engines that refuse their folder: test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusionrl.engines.server_patches import WrongModel, check_loaded, reading_errors
from fusionrl.models.engine_config import engine_fields
from fusionrl.models.shape import read_model_shape, shape_from_hf_config
from tests.models.test_families import shape_of
from tests.models.test_shape import LLAMA

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"


class Attention(nn.Module):
    """What SGLang's layers show of themselves."""

    def __init__(
        self, size: int, base: float = 5e5, eps: float = 1e-6, window: int | None = -1, number: int = 0
    ) -> None:
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.rotary_dim, self.rotary.base = size, base  # type: ignore[assignment]
        self.norm = nn.Module()
        self.norm.variance_epsilon = eps  # type: ignore[assignment]
        self.radix = nn.Module()
        self.radix.sliding_window_size, self.radix.qk_head_dim = window, size  # type: ignore[assignment]
        self.radix.layer_id = number  # type: ignore[assignment]


def test_weights_that_are_not_found_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    def load(*numbers: int) -> None:
        for number in numbers:
            model[number].weight.data.copy_(torch.ones_like(model[number].weight))  # as SGLang's loaders do

    check_loaded(model, lambda: load(0, 2))
    with pytest.raises(WrongModel, match=r"of 1 of 2 matrices, the first 2.weight: .* than Sequential does"):
        check_loaded(model, lambda: load(0))
    with pytest.raises(WrongModel, match="of 2 of 2"):
        check_loaded(model, lambda: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_matrices_of_each_type(dtype: torch.dtype) -> None:
    """Those of integers cannot be looked at."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 3).to(dtype), requires_grad=False)
    model.weight_scale = nn.Parameter(torch.ones(2, 1), requires_grad=False)  # type: ignore[assignment]

    def load() -> None:
        weight: Any = model.weight
        weight.data.copy_(torch.ones(2, 3).to(dtype))

    check_loaded(model, load)
    if dtype.is_floating_point:
        with pytest.raises(WrongModel, match="of 1 of 1"):
            check_loaded(model, lambda: None)


def test_ends_may_come_from_another_model() -> None:
    """A model that drafts takes them from the one that it drafts for."""
    model: Any = nn.Module()
    model.embed_tokens, model.lm_head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    kept: Tensor = model.lm_head.weight.clone()
    check_loaded(model, lambda: None)
    assert torch.equal(model.lm_head.weight, kept)


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        ({}, None),
        ({"window": None}, None),
        ({"base": 1e4}, "SGLang reads rope_theta 10000 where trainers read 500000"),
        ({"eps": 1e-5}, "SGLang reads rms_norm_eps 1e-05 where trainers read 1e-06"),
        ({"window": 31}, "SGLang reads sliding_window 32 where trainers read none"),
    ],
)
def test_numbers_that_both_read_are_compared(layer: dict[str, Any], part: str | None) -> None:
    shape = shape_from_hf_config(LLAMA | {"rope_theta": 5e5})
    model = nn.Sequential(Attention(8), Attention(8, **layer))
    assert reading_errors(model, shape) == ([] if part is None else [part])


@pytest.mark.parametrize(
    ("first", "second", "errors"),
    [
        ({"window": 7, "base": 1e4}, {"base": 1e6}, []),
        ({"window": 8, "base": 1e4}, {"base": 1e6}, ["SGLang reads sliding_window 9 where trainers read 8"]),
        ({"base": 1e4}, {"base": 1e6}, ["SGLang reads sliding_window none where trainers read 8"]),
        ({"window": 7, "base": 1e6}, {"base": 1e6}, ["SGLang reads rope_theta 1e+06 where trainers read 10000"]),
    ],
)
def test_numbers_of_each_layer_are_compared(first: dict[str, Any], second: dict[str, Any], errors: list[str]) -> None:
    """SGLang's number leaves the token itself out."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 8}
    shape = shape_from_hf_config(LLAMA | {"model_type": "gemma3_text"} | layers)
    model = nn.Sequential(Attention(8, **first), Attention(8, number=1, **second))
    assert reading_errors(model, shape) == errors


@pytest.mark.parametrize("base", [1e6, 1e4])
def test_the_layer_of_a_drafting_model_has_a_number_of_its_own(base: float) -> None:
    """Layer 0 of Qwen3.5 is a delta net, which rotates nothing; that of its layer of multi-token prediction attends."""
    shape = shape_of("qwen3_5_text")
    assert not shape.attention[0].rotary_dim(shape)
    attention = Attention(max(kind.rotary_dim(shape) for kind in shape.attention), base, shape.rms_norm_eps)
    draft = type("Qwen3_5ForCausalLMMTP", (nn.Sequential,), {})(attention)
    wrong = [f"SGLang reads rope_theta 10000 where trainers read {shape.rope_theta:g}"]
    assert reading_errors(draft, shape) == ([] if base == shape.rope_theta else wrong)


def test_fields_that_transformers_leaves_out(tmp_path: Any) -> None:
    """Of DeepSeek's router; the folder's own values win, and a family that is not known needs none."""
    latent = {"model_type": "deepseek_v3", "scoring_func": "softmax", "n_group": 4, "topk_group": None}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    assert engine_fields(tmp_path) == {"moe_layer_freq": 1, "topk_group": 1, "topk_method": "noaux_tc"}
    flash = {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]}
    (tmp_path / "config.json").write_text(json.dumps(flash))
    assert engine_fields(tmp_path)["first_k_dense_replace"] == 2
    (tmp_path / "config.json").write_text(json.dumps(latent | {"model_type": "glm_moe_dsa", "index_topk": 64}))
    served = engine_fields(tmp_path)  # by the class of DeepSeek-V3, which would take 1,536 and 1e-6
    assert (served["model_type"], served["index_topk"], served["max_position_embeddings"]) == ("deepseek_v3", None, 64)
    assert (served["q_lora_rank"], served["rms_norm_eps"], served["topk_group"]) == (2048, 1e-5, 1)
    assert "n_group" not in served and "scoring_func" not in served
    for raw in ({"model_type": "llama"}, {"model_type": "unheard_of"}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert engine_fields(tmp_path) == {}
    assert engine_fields("an/id/of/the/hub") == {}


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_published_folders_get_no_other_base_of_rotary_embeddings(config: Path, tmp_path: Path) -> None:
    """Qwen3-Next is published with its base at the top, as SGLang reads it; other folders have it in a part."""
    (tmp_path / "config.json").write_text(config.read_text())
    theta = read_model_shape(tmp_path).rope_theta
    assert engine_fields(tmp_path).get("rope_theta", theta) == theta


def test_a_share_of_heads_that_transformers_5_saved(tmp_path: Path) -> None:
    for share, fields in ((0.5, {"partial_rotary_factor": 0.5}), (1.0, {})):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "rope_parameters": rope}))
        assert engine_fields(tmp_path) == fields


def test_the_rotary_base_of_a_folder_that_transformers_4_saved(tmp_path: Path) -> None:
    """Qwen3-Next is published with it outside of `rope_parameters`; engines read the same."""
    published = Path(__file__).parents[1] / "recipes" / "configs" / "qwen3-next-80b-a3b.json"
    (tmp_path / "config.json").write_text(published.read_text())
    assert engine_fields(tmp_path) == {}
    raw = json.loads(published.read_text())
    del raw["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": {"rope_theta": 5e6}}))
    assert engine_fields(tmp_path) == {"rope_theta": 5e6}
