"""YaRN's frequencies are those of transformers and of SGLang's engines, number by number."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fusionrl.base import cpu_wing
from fusionrl.cpu import megatron_patches
from fusionrl.models.kinds.attention import Yarn
from fusionrl.models.shape import ModelShape, shape_from_hf_config

POSITIONS = 128
CASES: dict[str, dict[str, Any]] = {
    "as Qwen writes it": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "with a fraction": {"factor": 2.5, "original_max_position_embeddings": 262144},
    "of all positions": {"factor": 4.0},
    "with a ramp of its own": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    "with mscale": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.8, "mscale_all_dim": 0.6},
    "not truncated": {"factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
    "of factor 1": {"factor": 1.0, "original_max_position_embeddings": 128},
}


def _config(scaling: dict[str, Any], **changes: Any) -> tuple[Qwen3Config, dict[str, Any]]:
    """transformers' configuration, and what stands in its file."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 2048}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, **scaling}
    config = Qwen3Config(**sizes, rope_parameters={**rope, "factor": 4.0} | scaling)
    return config, config.to_dict() | {"rope_parameters": rope} | changes


def _shape(name: str) -> ModelShape:
    return shape_from_hf_config(_config(CASES[name])[1])


def yarn_frequencies(shape: ModelShape, yarn: Yarn) -> torch.Tensor:
    megatron_patches.install()
    from fusionrl.trainer import layer_traits  # Megatron, after the shims

    return layer_traits.yarn_frequencies(yarn, shape.head_dim, shape.rope_theta)


def _yarn(shape: ModelShape) -> Yarn:
    assert shape.rope_scaling is not None
    return Yarn.of(shape.rope_scaling, shape.max_position_embeddings)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    shape, yarn = _shape(name), _yarn(_shape(name))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](_config(CASES[name])[0], torch.device("cpu"))
    assert torch.allclose(yarn_frequencies(shape, yarn), expected, rtol=1e-6, atol=0)
    assert yarn.attention_factor == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_engines_turn_positions_by_the_same_angles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's own table of cosines and sines has it."""
    pytest.importorskip("sglang")
    cpu_wing.install_stand_ins()
    from sglang.srt.layers.rotary_embedding import base, get_rope

    monkeypatch.setattr(base, "_is_cpu", True)  # as in an engine's process, which has a variable for it
    shape, yarn = _shape(name), _yarn(_shape(name))
    sizes = {"rotary_dim": shape.head_dim, "max_position": shape.max_position_embeddings, "base": shape.rope_theta}
    rope = get_rope(shape.head_dim, **sizes, rope_scaling=shape.rope_scaling, dtype=torch.float32)
    angles = torch.arange(POSITIONS)[:, None] * yarn_frequencies(shape, yarn)
    expected = torch.cat((angles.cos(), angles.sin()), -1) * yarn.attention_factor
    assert torch.allclose(rope.cos_sin_cache[:POSITIONS], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("scaling", "changes", "told"),
    [
        ({"factor": 4.0, "attention_factor": 1.2}, {}, "read attention_factor in different ways"),
        ({"factor": 0.5}, {}, "a factor of at least 1"),
        ({}, {}, "a factor of at least 1"),
        ({"factor": 4.0}, {"model_type": "llama"}, "supported are default and llama3"),
    ],
)
def test_what_the_two_would_compute_in_different_ways_is_refused(
    scaling: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        shape_from_hf_config(_config(scaling, **changes)[1])
