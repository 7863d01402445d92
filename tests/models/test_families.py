"""The tables of the families: both ways, for every tensor, under tensor parallelism."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

import plugins.models
from fusionrl.models import convert, families
from fusionrl.models.families import parts
from fusionrl.models.hf_io import HFReader, read_part
from fusionrl.models.rules import Names
from fusionrl.models.shape import ModelShape, read_model_shape, shape_from_hf_config
from tests import tiny_vision
from tests.trainer import hf_models

NAMES = [*hf_models.FAMILIES, *hf_models.PLUGINS]


def shape_of(family: str, tied: bool = False, **values: object) -> ModelShape:
    config = hf_models.config_of(family, tied, **values)
    return shape_from_hf_config(json.loads(config.to_json_string(use_diff=False)) | {"model_type": family})


def test_every_family_is_tested() -> None:
    seeing = {f"{kind}_text" for kind in tiny_vision.KINDS}  # tests/models/test_vision.py
    assert {family.model_type for family in families.built_in()} == {*hf_models.FAMILIES, *hf_models.SPARSE, *seeing}
    files = {path.stem for path in Path(plugins.models.__file__).parent.glob("[a-z]*.py")}
    assert files == set(hf_models.PLUGINS)


def test_the_example_refuses_what_it_does_not_compute() -> None:
    """Mistral 7B v0.1 has a window shorter than its positions; one that is as long changes nothing."""
    assert shape_of("mistral", sliding_window=128).head_dim == 16
    with pytest.raises(ValueError, match="sliding_window 64 is not supported for mistral"):
        shape_of("mistral", sliding_window=64)


@pytest.mark.parametrize(("family", "tied"), [*((name, False) for name in NAMES), ("llama", True)])
def test_names_and_shapes_are_those_of_a_checkpoint(hf, family, tied):
    """Those that transformers wrote, which is not how it holds them: its experts stand in one tensor a layer."""
    folder, _ = hf(family, tied)
    shape = read_model_shape(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        want = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if tied:
        want.pop("lm_head.weight", None)
    assert families.hf_shapes(shape) == want
    buffers = sum(rule.numel for rule in families.model_rules(shape).values() if rule.buffer)
    assert shape.num_parameters + buffers == sum(torch.Size(sizes).numel() for sizes in want.values())


def of_rule(rule: families.Rule, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a checkpoint; of a stack, the part of the rule's expert."""
    return tensor[rule.expert] if rule.stack else tensor


@pytest.mark.parametrize(("vocab", "size"), [(120, 1), (121, 1), (120, 2), (121, 2), (121, 4)])
@pytest.mark.parametrize("family", NAMES)
def test_there_and_back(family, vocab, size):
    heads = {"num_key_value_heads": 4} if size == 4 else {}
    if size == 4 and "linear_num_key_heads" in hf_models.FAMILIES.get(family, {}):
        heads |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    shape = shape_of(family, vocab_size=vocab, **heads)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(s, generator=generator) for name, s in families.hf_shapes(shape).items()}
    back = {}
    for rule in families.model_rules(shape).values():
        full = convert.join(rule, [of_rule(rule, tensors[name]) for name in rule.hf])
        pieces = [convert.split(rule, full, rank, size) for rank in range(size)]
        assert len({piece.shape for piece in pieces}) == 1
        if rule.split != "replicated":
            assert sum(piece.numel() for piece in pieces) >= full.numel()
            assert size == 1 or pieces[0].numel() < full.numel()
        parts_back = convert.take_apart(rule, convert.gather(rule, pieces))
        for name, part in zip(rule.hf, parts_back, strict=True):
            of_rule(rule, back.setdefault(name, torch.empty(rule.stored[name]))).copy_(part)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize(
    ("family", "other"), [("mimo", "qwen2"), ("granite", "llama"), ("kimi_k2", "deepseek_v3")], ids=str
)
def test_families_with_the_tensors_of_another(family, other):
    """What is tested of the other's saving and pushes holds for these."""
    assert families.model_rules(shape_of(family)) == families.model_rules(shape_of(other))


@pytest.mark.parametrize("family", NAMES)
def test_a_rank_reads_its_part_only(hf, family, monkeypatch):
    """What is read for each rank is what a split of the whole gives, and it is no more than that."""
    folder, _ = hf(family, False)
    reader, shape = HFReader(folder), read_model_shape(folder)
    read: list[int] = []
    get = HFReader.get

    def counted(self, *args):
        tensor = get(self, *args)
        read.append(tensor.numel())
        return tensor

    for rule in families.model_rules(shape).values():
        full = convert.join(rule, [of_rule(rule, reader.get(name, sizes)) for name, sizes in rule.stored.items()])
        for rank in range(2):
            read.clear()
            monkeypatch.setattr(HFReader, "get", counted)
            part = read_part(reader, rule, rank, 2)
            monkeypatch.setattr(HFReader, "get", get)
            assert torch.equal(part, convert.split(rule, full, rank, 2)), rule.megatron
            assert sum(read) <= part.numel()


def test_gate_and_up_are_split_each():
    shape = shape_of("llama")
    rule = families.model_rules(shape)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = torch.arange(48)[:, None], 100 + torch.arange(48)[:, None]
    part = convert.split(rule, convert.join(rule, [gate, up]), 1, 2)
    assert part[:, 0].tolist() == [*range(24, 48), *range(124, 148)]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("3.self_attention.linear_qkv.layer_norm_weight", "5.input_layernorm.weight"),
        ("3.mlp.linear_fc1.layer_norm_weight", "5.pre_mlp_layernorm.weight"),
        ("0.self_attention.linear_kv_up_proj.layer_norm_weight", "2.self_attention.kv_layernorm.weight"),
        ("0.mlp.experts.linear_fc1.weight3", "2.mlp.experts.local_experts.11.linear_fc1.weight"),
        ("0.mlp.experts.linear_fc2.bias3", "2.mlp.experts.local_experts.11.linear_fc2.bias"),
        ("1.mlp.experts.local_experts.0.linear_fc2.weight", "3.mlp.experts.local_experts.8.linear_fc2.weight"),
        ("0.mlp.shared_experts.linear_fc1.weight", "2.mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_names_in_the_whole_model(name, plain):
    """Transformer Engine's names, and the numbers of a rank's layers and experts."""
    assert families.canonical_name(f"decoder.layers.{name}", 2, 8) == f"decoder.layers.{plain}"
    assert families.canonical_name("output_layer.weight", 2, 8) == "output_layer.weight"


@pytest.mark.parametrize("layer", ["transformer_layer", "mtp_model_layer"])  # Megatron-core 0.16's, 0.19's
@pytest.mark.parametrize("norm", ["input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"])
def test_names_of_layers_of_multi_token_prediction(layer, norm):
    name = families.canonical_name(f"mtp.layers.0.{layer}.{norm}", 2, 8)
    assert name == "mtp.layers.0.transformer_layer.input_layernorm.weight"


def test_published_sizes():
    """Parameters of two published models, in all and active: 671 B and 37 B (arXiv:2412.19437), 46.7 B and 12.9 B."""
    from transformers import AutoConfig

    for family, total, active in (("deepseek_v3", 671, 37.6), ("mixtral", 46.7, 12.9)):
        shape = shape_from_hf_config(json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False)))
        assert shape.num_parameters / 1e9 == pytest.approx(total, rel=2e-3)
        assert shape.num_active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_a_family_of_ones_own(tmp_path, monkeypatch):
    """A file in plugins/models is all that it takes."""
    package = tmp_path / "plugins" / "models"
    package.mkdir(parents=True)
    (package / "mymodel.py").write_text(
        "from fusionrl.models.families import Family, llama\nFAMILY = Family('mymodel', llama.read, llama.layer)\n"
    )
    (package / "empty.py").write_text("")
    (package / "former.py").write_text("from fusionrl.models.families.hf_config import HfConfig\n")
    monkeypatch.setattr(plugins.models, "__path__", [*plugins.models.__path__, str(package)])
    raw = json.loads(hf_models.config_of("llama", False).to_json_string(use_diff=False))
    shape = shape_from_hf_config(raw | {"model_type": "mymodel"})
    assert families.hf_shapes(shape) == families.hf_shapes(shape_from_hf_config(raw))
    with pytest.raises(ValueError, match=r"plugins/models/empty.py has no FAMILY"):
        shape_from_hf_config(raw | {"model_type": "empty"})
    with pytest.raises(ValueError, match=r"former.py: fusionrl.models.families.hf_config is now fusionrl.models.rules"):
        shape_from_hf_config(raw | {"model_type": "former"})
    with pytest.raises(ValueError, match="model_type 'mamba' is not supported; supported are llama, "):
        shape_from_hf_config(raw | {"model_type": "mamba"})


def test_families_of_the_guide(tmp_path, monkeypatch):
    """Both files of docs/guides/own-model.md, as they are there."""
    page = Path(plugins.models.__file__).parents[2].joinpath("docs/guides/own-model.md").read_text(encoding="utf-8")
    files = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FAMILY = " in code]
    monkeypatch.setattr(plugins.models, "__path__", [str(tmp_path)])
    raw = json.loads(hf_models.config_of("llama", False).to_json_string(use_diff=False))
    shapes = []
    for number, code in enumerate(files):
        name = f"my_model{number}"
        (tmp_path / f"{name}.py").write_text(code.replace('"my_model"', f'"{name}"'))
        shapes.append(shape_from_hf_config(raw | {"model_type": name}))
    first, second = shapes
    assert "model.layers.1.self_attn.k_norm.weight" in families.hf_shapes(first)
    assert [kind.rope for kind in second.attention] == [True, False]


def test_parts_of_a_mixture_as_a_plugin_calls_them():
    """Each layer written out, with Hugging Face's names."""
    shape, family = shape_of("mixtral"), families.get_family("mixtral")

    def layer(shape, number):
        yield from parts.norms(shape, number)
        yield from parts.attention(shape, number)
        yield from parts.mlp(shape, number, Names(experts="block_sparse_moe", expert=("w1", "w3", "w2")))

    assert list(layer(shape, 1)) == list(family.layer(shape, 1))
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        assert parts.num_experts({name: 7}) == 7


def test_rows_of_a_stack_are_gate_and_up_by_turns():
    """Expert 3 of four; transformers computes `x @ stack[3]`, and takes every second column for the gate."""
    rules = families.model_rules(shape_of("gpt_oss"))
    x, stack, bias = torch.randn(5, 32), torch.randn(4, 32, 96), torch.randn(4, 96)
    to = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1"
    weight = convert.join(rules[f"{to}.weight"], [stack[3]])
    both = torch.nn.functional.linear(x, weight, convert.join(rules[f"{to}.bias"], [bias[3]]))
    want = x @ stack[3] + bias[3]
    torch.testing.assert_close(both, torch.cat([want[:, ::2], want[:, 1::2]], 1))


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False is not supported for minimax_m2"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is not supported for minimax_m2"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "layers of linear attention"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha 1.5 is not supported for gpt_oss; supported is 1.702"),
    ],
)
def test_what_a_mixture_does_not_compute_is_refused(family, values, message):
    with pytest.raises(ValueError, match=message):
        shape_of(family, **values)


def test_rotary_embeddings_of_minimax_as_it_is_published():
    """The size of what is rotated, not its share."""
    raw = json.loads(hf_models.config_of("minimax_m2", False).to_json_string(use_diff=False))
    raw = {name: value for name, value in raw.items() if name != "rope_parameters"} | {"rope_theta": 5e6}
    assert shape_from_hf_config(raw | {"rotary_dim": 4}).rotary_percent == 0.25
    both = raw | {"rotary_dim": 4, "partial_rotary_factor": 0.5}  # transformers takes the share
    config = AutoConfig.for_model(**both)
    assert shape_from_hf_config(both).rotary_percent == config.rope_parameters["partial_rotary_factor"] == 0.5


def test_groups_that_megatron_ranks_otherwise_are_refused():
    assert shape_of("deepseek_v3").mixture.group_topk == 2
    with pytest.raises(ValueError, match="num_experts_per_tok 6 with topk_group 2 is not supported"):
        shape_of("deepseek_v3", num_experts_per_tok=6)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_a_model_of_dense_layers_alone_has_no_experts(family):
    shape = shape_of(family, first_k_dense_replace=2)
    assert shape.num_experts == 0
    assert not any("experts" in name for name in families.hf_shapes(shape))
