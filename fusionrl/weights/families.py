"""One table a model family: which Hugging Face tensors make which Megatron tensor. Used both ways. Pure.

A rule names a Megatron tensor, the Hugging Face tensors it is made of, how they are joined, and how the
result is split over tensor-parallel ranks. Loading joins and splits; exporting gathers and takes apart.

Megatron's names are those of the local layer spec; Transformer Engine's fused names are mapped onto them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fusionrl.config.model_shape import ModelShape

Join = Literal["copy", "qkv", "gate_up"]
Split = Literal["replicated", "rows", "columns", "paired_rows"]


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor.

    join:  copy     one tensor, as it is
           qkv      query, key and value rows, interleaved by query group: (q of group 0, k 0, v 0, q of
           group 1, …) gate_up  gate over up
    split: replicated; rows (dimension 0); columns (dimension 1); paired_rows (rows of each half of dimension
        0)
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join
    split: Split


_QKV = tuple(f"model.layers.{{layer}}.self_attn.{x}_proj" for x in "qkv")

_EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "copy", "rows")
_FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "copy", "replicated")
_OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "copy", "rows")

_LAYER = (
    Rule(
        "decoder.layers.{layer}.input_layernorm.weight",
        ("model.layers.{layer}.input_layernorm.weight",),
        "copy",
        "replicated",
    ),
    Rule(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV),
        "qkv",
        "rows",
    ),
    Rule(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        ("model.layers.{layer}.self_attn.o_proj.weight",),
        "copy",
        "columns",
    ),
    Rule(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        "copy",
        "replicated",
    ),
    Rule(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        "gate_up",
        "paired_rows",
    ),
    Rule(
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        ("model.layers.{layer}.mlp.down_proj.weight",),
        "copy",
        "columns",
    ),
)
_QKV_BIAS = Rule(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    tuple(f"{name}.bias" for name in _QKV),
    "qkv",
    "rows",
)
_QK_NORM = tuple(
    Rule(
        f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight",
        (f"model.layers.{{layer}}.self_attn.{x}_norm.weight",),
        "copy",
        "replicated",
    )
    for x in "qk"
)

# Rules of one layer; embedding, final norm and output layer are the same in all families.
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": _LAYER,
    "qwen2": (*_LAYER, _QKV_BIAS),
    "qwen3": (*_LAYER, *_QK_NORM),
}

# Tensors that some checkpoints carry and no model needs: a tied output layer, and buffers of older versions.
IGNORED = re.compile(r"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias")

_TE_NAMES = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)


def canonical_name(name: str) -> str:
    """The local spec's name of a Megatron parameter, whichever spec `name` is of."""
    for fused, plain in _TE_NAMES:
        name = name.replace(fused, plain)
    return name


def model_rules(shape: ModelShape) -> dict[str, Rule]:
    """Megatron name → rule with the layer filled in, for the whole model, in the order of export."""
    rules = {_EMBEDDING.megatron: _EMBEDDING}
    for layer in range(shape.num_layers):
        for rule in FAMILIES[shape.model_type]:
            name = rule.megatron.format(layer=layer)
            rules[name] = Rule(name, tuple(hf.format(layer=layer) for hf in rule.hf), rule.join, rule.split)
    rules[_FINAL_NORM.megatron] = _FINAL_NORM
    if not shape.tie_word_embeddings:
        rules[_OUTPUT.megatron] = _OUTPUT
    return rules


def rule_of(name: str, shape: ModelShape, rules: dict[str, Rule]) -> Rule:
    """The rule of the parameter `name`; the copy of a tied embedding on a last stage has the embedding's."""
    if name == _OUTPUT.megatron and shape.tie_word_embeddings:
        return Rule(_OUTPUT.megatron, _EMBEDDING.hf, "copy", "rows")
    return rules[name]


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape, for the whole model, in the order of export."""
    h, d, f = shape.hidden_size, shape.head_dim, shape.ffn_hidden_size
    q, kv = shape.num_attention_heads * d, shape.num_query_groups * d
    ends: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocab_size, h),
        "lm_head.weight": (shape.vocab_size, h),
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (h, q),
        "q_norm.weight": (d,),
        "k_norm.weight": (d,),
        "gate_proj.weight": (f, h),
        "up_proj.weight": (f, h),
        "down_proj.weight": (h, f),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
    }
    names = [hf for rule in model_rules(shape).values() for hf in rule.hf]
    return {name: ends[name if name in ends else ".".join(name.rsplit(".", 2)[-2:])] for name in names}


def join(rule: Rule, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """The whole Megatron tensor made of `tensors`, which are in the order of `rule.hf`."""
    if rule.join == "copy":
        return tensors[0]
    if rule.join == "gate_up":
        return torch.cat(list(tensors))
    groups, rest = shape.num_query_groups, tensors[0].shape[1:]
    return torch.cat([x.reshape(groups, -1, *rest) for x in tensors], dim=1).reshape(-1, *rest)


def take_apart(rule: Rule, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """The Hugging Face tensors of a whole Megatron tensor, in `rule.hf`'s order; the inverse of `join`."""
    if rule.join == "copy":
        return [full]
    if rule.join == "gate_up":
        return list(full.chunk(2))
    groups, rest, d = shape.num_query_groups, full.shape[1:], shape.head_dim
    per_group = shape.num_attention_heads // groups
    parts = full.reshape(groups, (per_group + 2) * d, *rest).split([per_group * d, d, d], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def split(rule: Rule, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel `rank` of `size` holds.

    Rows of the vocabulary are padded with zeros where `size` does not divide them.
    """
    if rule.split == "replicated" or size == 1:
        return full
    if rule.split == "columns":
        return full.chunk(size, dim=1)[rank]
    if rule.split == "paired_rows":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    rows = -(-full.size(0) // size)
    part = full[rank * rows : (rank + 1) * rows]
    if part.size(0) < rows:
        part = torch.cat([part, part.new_zeros(rows - part.size(0), *part.shape[1:])])
    return part


def gather(rule: Rule, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """The whole Megatron tensor of all ranks' parts, without the vocabulary's padding; inverse of `split`."""
    if rule.split == "replicated":
        return parts[0]
    if rule.split == "columns":
        return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
    if rule.split == "paired_rows" and len(parts) > 1:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    full = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return full[: shape.vocab_size] if rule.hf[0] in ("model.embed_tokens.weight", "lm_head.weight") else full
