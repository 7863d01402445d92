"""PEFT's folders: what one may say, tensors by their names, and each rank's part of them."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionrl.models import convert
from fusionrl.models.hf_io import PeftReader, read_part
from fusionrl.models.hf_save import write_peft
from fusionrl.models.peft import CONFIG, WEIGHTS, read_peft
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.models.trainable import AdapterSpec, adapter_rules
from tests.models.test_families import shape_of
from tests.tiny_vision import raw_config

SPEC = AdapterSpec(rank=4, alpha=6, use_rslora=True, excluded=("layers.1.self_attn.q_proj",))
SHAPE = shape_of("qwen3")


def tensors_of(spec, shape):
    sizes = {name: sizes for rule in adapter_rules(shape, spec).values() for name, sizes in rule.hf.items()}
    return {name: torch.randn(*of) for name, of in sizes.items()}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapter"
    write_peft(path, SPEC, SHAPE, "org/base", tensors_of(SPEC, SHAPE).items(), write=True)
    return path


def change(folder, **fields):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors) or tensors, folder / WEIGHTS)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "phi3"])
@pytest.mark.parametrize("size", [1, 2])
def test_written_and_read_in_parts(tmp_path, family, size):
    """Each rank reads what it would hold of the whole tensors."""
    shape = shape_of(family)
    spec = AdapterSpec(rank=4, alpha=8, use_rslora=True)
    tensors = tensors_of(spec, shape)
    write_peft(tmp_path / "a", spec, shape, "org/base", tensors.items(), write=True)
    peft = read_peft(tmp_path / "a", shape)
    peft.check(spec)
    reader = PeftReader(peft)
    for rule in adapter_rules(shape, spec).values():
        whole = convert.join(rule, [tensors[name] for name in rule.hf])
        for rank in range(size):
            assert torch.equal(read_part(reader, rule, rank, size), convert.split(rule, whole, rank, size))


def test_the_config_says_what_was_trained(folder):
    config = json.loads((folder / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, True)
    assert config["base_model_name_or_path"] == "org/base"
    others = ["down_proj", "gate_proj", "k_proj", "o_proj", "up_proj", "v_proj"]
    assert set(config["target_modules"]) == {*others, "model.layers.0.self_attn.q_proj"}, "not that of layer 1"
    spec = read_peft(folder, SHAPE).spec
    assert adapter_rules(SHAPE, spec) == adapter_rules(SHAPE, SPEC)
    assert spec.scale == SPEC.scale == 3.0


def test_a_model_that_sees_has_the_names_of_the_whole_model(tmp_path):
    """Its tower has modules of the same names, which have no adapters."""
    shape = shape_from_hf_config(raw_config("qwen2_5_vl"), sees=True)
    spec = AdapterSpec(rank=4, alpha=8)
    write_peft(tmp_path / "a", spec, shape, "org/base", tensors_of(spec, shape).items(), write=True)
    assert all(
        name.startswith("base_model.model.model.language_model.") for name in load_file(tmp_path / "a" / WEIGHTS)
    )
    targets = json.loads((tmp_path / "a" / CONFIG).read_text())["target_modules"]
    assert "model.language_model.layers.0.mlp.up_proj" in targets and "up_proj" not in targets
    read_peft(tmp_path / "a", shape).check(spec)


@pytest.mark.parametrize("infix", ["", ".default"])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_other_spellings_of_names(folder, prefix, infix):
    wanted = load_file(folder / WEIGHTS)

    def spelled(name):
        return prefix + name.removeprefix("base_model.model.").replace(".weight", f"{infix}.weight")

    change_tensors(folder, lambda tensors: {spelled(name): value for name, value in tensors.items()})
    reader = PeftReader(read_peft(folder, SHAPE))
    assert all(torch.equal(reader.get(name, value.shape), value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear", "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": r".*\.layers\.\d+\..*_proj"},
        {
            "init_lora_weights": "gaussian",
            "lora_dropout": 0.5,
            "megatron_core": "megatron.core",
            "qalora_group_size": 8,
        },
        {"task_type": None, "revision": "main", "of_a_later_version": None, "another": {}, "a_third": False},
    ],
)
def test_configs_of_plain_lora(folder, fields):
    change(folder, **fields)
    read_peft(folder, SHAPE).check(SPEC)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"use_dora": True}, "use_dora is True in adapter_config.json, which is not supported; merge the adapter into"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"lora_bias": True}, "lora_bias"),
        ({"of_a_later_version": "on"}, "of_a_later_version is 'on'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3' in adapter_config.json, not 'LORA'"),
        ({"r": 0}, "r is 0 in adapter_config.json"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"r": 8}, "lora_A.weight has shape (4, "),
    ],
)
def test_refused_configs(folder, fields, part):
    change(folder, **fields)
    with pytest.raises(ValueError, match=re.escape(part)) as error:
        read_peft(folder, SHAPE).spec  # noqa: B018
    assert str(error.value).startswith(f"--lora-adapter-path {folder}: ")


def _without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.zeros(1)}, "lm_head.weight is not LoRA"),
        (_without("layers.0.mlp.up_proj.lora_B"), "has no base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"),
        (
            lambda tensors: {name.replace("layers.1", "layers.7"): value for name, value in tensors.items()},
            "layers.7.mlp.down_proj.lora_A.weight adapts no linear layer of this qwen3 model",
        ),
    ],
)
def test_refused_tensors(folder, edit, part):
    change_tensors(folder, edit)
    with pytest.raises(ValueError, match=re.escape(part)):
        read_peft(folder, SHAPE)


def test_flags_that_contradict_the_folder(folder):
    with pytest.raises(
        ValueError, match=f"^--lora-adapter-path {folder}: the adapters there have rank 4; give --lora-rank 4"
    ):
        read_peft(folder, SHAPE).check(SPEC.model_copy(update={"rank": 8}))


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "adapter_config.json cannot be read"),
        (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "safe_serialization=True"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"12"), "not a safetensors file"),
    ],
)
def test_damaged_folders(folder, edit, part):
    edit(folder)
    with pytest.raises(ValueError, match=part):
        read_peft(folder, SHAPE)


def test_a_write_that_fails_leaves_no_folder(tmp_path):
    def broken():
        yield "base_model.model.a.lora_A.weight", torch.zeros(1)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_peft(tmp_path / "a", SPEC, SHAPE, "org/base", broken(), write=True)
    assert not (tmp_path / "a").exists()
