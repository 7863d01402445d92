"""The tables of the families: both ways, for every tensor, under tensor parallelism."""

from __future__ import annotations

import pytest
import torch

from fusionrl.config.model_shape import ModelShape
from fusionrl.weights import families


def shape_of(family: str, tied: bool, vocab: int = 40) -> ModelShape:
    return ModelShape(
        model_type=family,
        num_layers=2,
        hidden_size=24,
        ffn_hidden_size=40,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=8,
        vocab_size=vocab,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=tied,
        attention_bias=family == "qwen2",
        qk_layernorm=family == "qwen3",
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_names_and_shapes_are_those_of_transformers(family, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(family, tied)
    config = AutoConfig.for_model(
        family,
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    want = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert families.hf_shapes(shape) == want
    assert shape.num_parameters == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("vocab", [40, 41])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_there_and_back(family, vocab, size):
    shape = shape_of(family, False, vocab)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(s, generator=generator) for name, s in families.hf_shapes(shape).items()}
    back = {}
    for rule in families.model_rules(shape).values():
        full = families.join(rule, [tensors[name] for name in rule.hf], shape)
        parts = [families.split(rule, full, rank, size) for rank in range(size)]
        assert len({part.shape for part in parts}) == 1
        if rule.split != "replicated":
            assert sum(part.numel() for part in parts) >= full.numel()
        parts_back = families.take_apart(rule, families.gather(rule, parts, shape), shape)
        back.update(zip(rule.hf, parts_back, strict=True))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_query_key_value_rows_stand_by_group():
    """Two groups of two heads: q0 q1 k0 v0 q2 q3 k1 v1, each eight rows."""
    shape = shape_of("llama", False)
    rule = families.model_rules(shape)["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (torch.arange(n).repeat_interleave(8)[:, None] + base for n, base in ((4, 0), (2, 10), (2, 20)))
    packed = families.join(rule, [q, k, v], shape)
    assert packed[::8, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    # A tensor-parallel rank gets whole groups.
    assert families.split(rule, packed, 1, 2)[::8, 0].tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_split_each():
    shape = shape_of("llama", False)
    rule = families.model_rules(shape)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = torch.arange(40)[:, None], 100 + torch.arange(40)[:, None]
    part = families.split(rule, families.join(rule, [gate, up], shape), 1, 2)
    assert part[:, 0].tolist() == [*range(20, 40), *range(120, 140)]


def test_transformer_engine_names():
    name = families.canonical_name("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
    assert name == "decoder.layers.3.input_layernorm.weight"
    name = families.canonical_name("decoder.layers.3.mlp.linear_fc1.layer_norm_weight")
    assert name == "decoder.layers.3.pre_mlp_layernorm.weight"
