"""YaRN's frequencies are those of transformers and of SGLang's engines, number by number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fusionrl.cpu import megatron_patches
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.models.yarn import Yarn

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


def _shape(scaling: dict[str, Any], **changes: Any) -> tuple[ModelShape, Qwen3Config]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 2048}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, **scaling}
    config = Qwen3Config(**sizes, rope_parameters=rope)
    raw = config.to_dict() | {"rope_parameters": rope} | changes
    return shape_from_hf_config(raw), config


def yarn_frequencies(shape: ModelShape, yarn: Yarn) -> torch.Tensor:
    megatron_patches.install()
    from fusionrl.trainer import layers  # Megatron, after the shims

    return layers.yarn_frequencies(yarn, shape.head_dim, shape.rope_theta)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    shape, config = _shape(CASES[name])
    assert shape.rope_scaling is not None
    yarn = Yarn.of(shape.rope_scaling, shape.max_position_embeddings)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = yarn_frequencies(shape, yarn)
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    assert yarn.attention_factor == pytest.approx(factor, rel=1e-7)


# SGLang's own table of cosines and sines, as an engine on a CPU builds it; it decides at its import that it is on one.
_TABLES = """
import json, sys
from fusionrl.base import cpu_wing
cpu_wing.install_stand_ins()
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
size, max_position, base, count, cases = json.load(sys.stdin)
tables = {
    name: get_rope(
        size, rotary_dim=size, max_position=max_position, base=base, rope_scaling=scaling, dtype=torch.float32
    ).cos_sin_cache[:count]
    for name, scaling in cases.items()
}
torch.save(tables, sys.argv[1])
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Name of a case → [POSITIONS, dimensions of a head]."""
    pytest.importorskip("sglang")
    shapes = {name: _shape(scaling)[0] for name, scaling in CASES.items()}
    one = next(iter(shapes.values()))
    cases = {name: shape.rope_scaling for name, shape in shapes.items()}
    told = [one.head_dim, one.max_position_embeddings, one.rope_theta, POSITIONS, cases]
    path = tmp_path_factory.mktemp("tables") / "tables.pt"
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, "-c", _TABLES, str(path)]
    subprocess.run(command, input=json.dumps(told), text=True, check=True, env=env, capture_output=True)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("name", CASES)
def test_engines_turn_positions_by_the_same_angles(name: str, tables: dict[str, torch.Tensor]) -> None:
    shape, _ = _shape(CASES[name])
    assert shape.rope_scaling is not None
    yarn = Yarn.of(shape.rope_scaling, shape.max_position_embeddings)
    angles = torch.arange(POSITIONS)[:, None] * yarn_frequencies(shape, yarn)
    expected = torch.cat((angles.cos(), angles.sin()), -1) * yarn.attention_factor
    assert torch.allclose(tables[name], expected, atol=2e-5)


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
    raw = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64}
    raw |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "yarn"} | scaling}
    raw["rope_parameters"] |= {"rope_theta": 1e6}
    with pytest.raises(ValueError, match=told):
        shape_from_hf_config(raw | changes)
