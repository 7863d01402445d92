"""Checkpoints in MXFP4: read as transformers reads them, their sizes checked, and engines told not to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionrl.models import families
from fusionrl.models.convert import dequantize_mxfp4
from fusionrl.models.engine_config import pushed_arguments
from fusionrl.models.hf_io import HFReader, read_part
from fusionrl.models.quantization import read_described, read_quantization, shape_errors
from fusionrl.models.shape import read_model_shape
from tests.tiny_model import make_mxfp4
from tests.trainer import hf_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4."""
    path = tmp_path_factory.mktemp("mxfp4")
    hf_models.make(path, "gpt_oss", False, intermediate_size=64)
    return make_mxfp4(path)


def test_every_value_is_that_of_transformers() -> None:
    """All bytes, with scales up to the ends of what bf16 has."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(8).view(2, 16, 4, 16)
    scales = torch.tensor([1, 2, 120, 127, 128, 200, 250, 251], dtype=torch.uint8).repeat(16).view(2, 16, 4)
    values = dequantize_mxfp4(blocks, scales)
    want = convert_moe_packed_tensors(blocks, scales)  # of bf16, transposed
    assert values.shape == (2, 16, 128) and torch.equal(values.transpose(1, 2), want.float())


def test_a_rank_reads_the_experts_that_it_has(folder: Path) -> None:
    reader, shape = HFReader(folder), read_model_shape(folder)
    assert reader.names == families.hf_shapes(shape).keys()
    stored = load_file(folder / "model.safetensors")
    of = "model.layers.1.mlp.experts.gate_up_proj"
    values = dequantize_mxfp4(stored[f"{of}_blocks"], stored[f"{of}_scales"])[2]  # [2 f, h]
    rule = families.model_rules(shape)["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert torch.equal(read_part(reader, rule, 0, 1), torch.cat([values[::2], values[1::2]]))


def test_sizes_are_checked_and_nothing_is_pushed_so(folder: Path, tmp_path: Path) -> None:
    shape = read_model_shape(folder)
    assert read_quantization(folder) is None and read_described(folder) == (shape, None)
    assert shape_errors(folder, shape, is_loaded=True) == []
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (error,) = shape_errors(tmp_path, shape, is_loaded=True)
    assert f"{name} has shape [4, 31, 2], but config.json (hidden_size 32) describes [4, 32, 2]" in error


def test_engines_wait_for_what_is_pushed(folder: Path, tmp_path: Path) -> None:
    arguments = pushed_arguments(folder, '{"a": 1}')
    assert arguments["load_format"] == "dummy"
    assert json.loads(arguments["json_model_override_args"]) == {"quantization_config": None, "a": 1}
    hf_models.make(tmp_path, "gpt_oss", False)
    assert pushed_arguments(tmp_path, None) == {}
