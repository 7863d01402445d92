"""config.json against the files' headers: each size that disagrees is found, and a model that is fine passes."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.checks.model import checked_shape, weight_shape_errors
from fusionrl.checks.validate import validate
from fusionrl.config.config import Config
from fusionrl.models.families import built_in
from fusionrl.models.hf_folder import INDEX, SINGLE
from tests.tiny_model import make_classifier, make_fp8
from tests.tiny_vision import KINDS, make_tiny_vlm

BLOCK = (16, 8)
Folders = Callable[[str, bool], Path]


@pytest.fixture
def folders(hf: Any) -> Folders:
    """folders(family, tied): a checkpoint that transformers wrote."""
    return lambda family, tied: hf(family, tied)[0]


def found(folder: Path, **values: Any) -> list[str]:
    errors = weight_shape_errors(Config.from_flat({"hf_checkpoint": str(folder)} | values))
    return [error.replace(str(folder), "MODEL") for error in errors]


def edit(folder: Path, copy: Path, **values: Any) -> Path:
    """A copy of the folder with other values in its config.json; None takes a key out."""
    shutil.copytree(folder, copy)
    raw = json.loads((copy / "config.json").read_text()) | values
    (copy / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return copy


def shard(folder: Path, copy: Path) -> Path:
    """A copy of the folder with its tensors in files of two, and an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, copy)
    tensors = load_file(copy / SINGLE)
    (copy / SINGLE).unlink()
    names, files = list(tensors), {}
    for start in range(0, len(names), 2):
        file = f"model-{start:05d}.safetensors"
        save_file({name: tensors[name] for name in names[start : start + 2]}, copy / file)
        files |= dict.fromkeys(names[start : start + 2], file)
    (copy / INDEX).write_text(json.dumps({"weight_map": files}))
    return copy


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the header of model.safetensors anew; the tensors' bytes stay."""
    data = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.mark.parametrize("family", sorted({family.model_type for family in built_in()}))
def test_a_model_that_is_fine(folders: Folders, family: str, tmp_path: Path) -> None:
    """Of each family, in one file, and block-wise in fp8 in several; for trainers and for engines alone."""
    folder = (
        tmp_path / "model" if (sees := family.removesuffix("_text")) in KINDS else folders(family, family == "llama")
    )
    if sees in KINDS:
        make_tiny_vlm(folder, sees)
    make_fp8(folder, tmp_path / "fp8", BLOCK)
    for model in (folder, shard(tmp_path / "fp8", tmp_path / "both")):
        assert found(model) == found(model, mode="eval") == []


def test_files_that_save_hf_will_read_are_there_before_the_start(folders: Folders, tmp_path: Path) -> None:
    """Trainers load a Megatron checkpoint, and saving takes what is not trained from the folder, if it has weights."""
    values: dict[str, Any] = {"mode": "sft", "megatron_checkpoint": str(tmp_path), "save_hf": str(tmp_path / "out")}
    (tmp_path / ".metadata").touch()
    for family, needs_files in (("deepseek_v3", True), ("llama", False)):
        folder = shard(folders(family, False), tmp_path / family)
        (folder / "tokenizer.json").write_text("{}")
        config = Config.from_flat({"hf_checkpoint": str(folder)} | values)
        assert checked_shape(config).model_type == family
        next(folder.glob("*.safetensors")).unlink()
        if needs_files:
            with pytest.raises(ValueError, match="--save-hf: .* names files that are missing: .*; fetch them, or take"):
                checked_shape(config)
            (folder / INDEX).unlink()
        assert checked_shape(config).model_type == family


# Of each family a key of config.json, another value, and the first tensor that has it.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": 16, "head_dim": 8}, "model.embed_tokens.weight"),
    ("qwen3", {"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
    ("glm4", {"num_attention_heads": 8}, "model.layers.0.self_attn.q_proj.weight"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 24}, "model.layers.1.mlp.shared_expert.gate_proj.weight"),
    ("qwen3_moe", {"moe_intermediate_size": 40}, "model.layers.0.mlp.experts.0.gate_proj.weight"),
    ("deepseek_v2", {"kv_lora_rank": 16}, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
    ("deepseek_v3", {"q_lora_rank": 16}, "model.layers.0.self_attn.q_a_proj.weight"),
]


@pytest.mark.parametrize(("family", "values", "tensor"), WRONG)
def test_a_size_that_disagrees(
    folders: Folders, family: str, values: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    """The error names tensor, both shapes and file."""
    refused_in(edit(folders(family, False), tmp_path / "model", **values), tensor)


def test_a_size_that_disagrees_in_shards_and_in_fp8(folders: Folders, tmp_path: Path) -> None:
    good = folders("qwen3_moe", False)
    make_fp8(good, tmp_path / "fp8", BLOCK)
    tensor = "model.layers.0.mlp.experts.0.gate_proj.weight"
    for source in (shard(good, tmp_path / "whole"), tmp_path / "fp8"):
        refused_in(edit(source, tmp_path / f"bad-{source.name}", moe_intermediate_size=40), tensor)


def refused_in(folder: Path, tensor: str) -> None:
    for mode in ("rl", "eval"):
        (error,) = (error for error in found(folder, mode=mode) if f"tensor {tensor} has shape [" in error)
        assert error.startswith("--hf-checkpoint MODEL/model") and ".safetensors: " in error
        assert "but config.json" in error and " describes [" in error


@pytest.mark.parametrize(
    ("family", "values", "part"),
    [
        ("llama", {"num_hidden_layers": 1}, "layers.1.input_layernorm.weight and 8 more are no part of the model"),
        ("llama", {"num_hidden_layers": 3}, "layers.2.input_layernorm.weight and 8 more are in none of its files"),
        ("glm4", {"attention_bias": False}, "tensor model.layers.0.self_attn.k_proj.bias and 5 more are no part of"),
    ],
)
def test_tensors_that_config_json_does_not_describe(
    folders: Folders, family: str, values: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Trainers would refuse them; engines take what they need."""
    folder = edit(folders(family, False), tmp_path / "model", **values)
    (error,) = found(folder)
    assert part in error and f"config.json describes a {family} of" in error
    assert found(folder, mode="eval") == []
    assert found(folder, mode="rl", megatron_checkpoint=str(tmp_path)) == [], "the trainers load another folder"
    assert found(folder, mode="sft", debug_random_weights=True) == []


def test_embeddings_that_are_tied_in_one_of_the_two(folders: Folders, tmp_path: Path) -> None:
    """An output layer beside tied embeddings is ignored; without tied embeddings it is missed."""
    assert found(edit(folders("llama", False), tmp_path / "beside", tie_word_embeddings=True)) == []
    (error,) = found(edit(folders("llama", True), tmp_path / "missing", tie_word_embeddings=False))
    assert "tensor lm_head.weight is in none of its files" in error and "with untied embeddings" in error


def test_scales_that_do_not_fit_the_blocks(folders: Folders, tmp_path: Path) -> None:
    make_fp8(folders("llama", False), tmp_path / "fp8", BLOCK)
    quantization = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    other = quantization | {"weight_block_size": [8, 8]}
    (error, *_) = found(edit(tmp_path / "fp8", tmp_path / "b", quantization_config=other))
    assert "q_proj.weight_scale_inv has shape [2, 4], but config.json describes [4, 4]" in error


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "compressed-tensors", "fp8"])
def test_quantised_otherwise_for_engines_alone(folders: Folders, method: str, tmp_path: Path) -> None:
    """Weights that the method packs are no mistake; the others' sizes still are."""
    import torch
    from safetensors.torch import load_file, save_file

    good = folders("llama", False)
    folder = edit(good, tmp_path / "model", quantization_config={"quant_method": method})
    stored = load_file(good / SINGLE)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight, module = stored[name], name.removesuffix(".weight")
        if method == "bitsandbytes":  # also in floats: bnb_4bit_quant_storage
            kind = torch.bfloat16 if "mlp" in name else torch.uint8
            stored[name] = torch.zeros(weight.numel() // 2, 1, dtype=kind)
            stored[f"{name}.absmax"] = torch.zeros(4)
        elif method == "gptq":
            stored[f"{module}.qweight"] = torch.zeros(weight.size(1) // 8, weight.size(0), dtype=torch.int32)
            del stored[name]
        elif method == "compressed-tensors":
            stored[f"{name}_packed"] = torch.zeros(weight.size(0), weight.size(1) // 8, dtype=torch.int32)
            del stored[name]
        else:  # a scale for a tensor
            stored[name], stored[f"{name}_scale"] = weight.to(torch.float8_e4m3fn), torch.ones(1)
    save_file(stored, folder / SINGLE)
    assert found(folder, mode="eval") == []
    (error, *_) = found(edit(folder, tmp_path / "wrong", vocab_size=119), mode="eval")
    assert "has shape [120, 32], but config.json (vocab_size 119) describes [119, 32]" in error


def test_other_folders_of_the_run(folders: Folders, tiny_model: Path, tmp_path: Path) -> None:
    good = folders("llama", False)
    bad = edit(good, tmp_path / "bad", vocab_size=121)
    scorer = make_classifier(tiny_model, tmp_path / "scorer")
    assert found(good, ref_load=str(good), rm_model=str(scorer)) == []
    for values, flag in (
        ({"ref_load": str(bad)}, "--ref-load"),
        ({"advantage_estimator": "ppo", "critic_load": str(bad)}, "--critic-load"),
        ({"advantage_estimator": "prime", "prm_load": str(bad)}, "--prm-load"),
        ({"use_opd": True, "opd_teacher_load": str(bad)}, "--opd-teacher-load"),
        ({"rm_model": str(edit(scorer, tmp_path / "bad-scorer", intermediate_size=40))}, "--rm-model"),
    ):
        (error,) = found(good, **values)
        assert error.startswith(f"{flag} ") and "has shape" in error
    assert found(good, advantage_estimator="ppo", critic_load=str(good)) == [], "a policy's folder has no value head"


def test_files_without_an_index(folders: Folders, tmp_path: Path) -> None:
    """Files beside model.safetensors are another format's."""
    folder = shutil.copytree(folders("llama", False), tmp_path / "model")
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")
    rewrite_header(folder, lambda header: {name.replace("q_proj", "wq"): entry for name, entry in header.items()})
    (error, *_) = found(folder)
    assert "self_attn.q_proj.weight and 1 more are in none of its files" in error


def test_it_is_told_with_all_other_mistakes(tiny_model: Path, tmp_path: Path) -> None:
    """Before anything starts; only headers are read: the bytes of the tensors may be anything."""
    folder = edit(tiny_model, tmp_path / "model", intermediate_size=100)
    errors = validate(Config.from_flat({"hf_checkpoint": str(folder), "rm_type": "nothing"}))[1]
    parts = ("gate_proj.weight has shape [128, 64], but config.json (intermediate_size 100)", "--rm-type nothing")
    for part in (*parts, "--prompt-data is required"):
        assert any(part in error for error in errors)
