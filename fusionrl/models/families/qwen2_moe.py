"""Qwen1.5-MoE and Qwen2-MoE: routed experts and one shared expert with its own gate."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def sparse_layers(raw: HfConfig) -> tuple[int, ...]:
    """The layers that have experts: every `decoder_sparse_step`-th but those of `mlp_only_layers`."""
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return tuple(i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def read(raw: HfConfig) -> dict[str, object]:
    moe = {
        "num_experts": parts.num_experts(raw),
        "topk": raw["num_experts_per_tok"],
        "ffn_hidden_size": raw["moe_intermediate_size"],
        "layers": sparse_layers(raw),
        "norm_topk_prob": raw.get("norm_topk_prob", False),
        "shared_ffn_hidden_size": raw["shared_expert_intermediate_size"],
        "shared_gate": True,
    }
    return parts.common(raw) | {"attention_bias": raw.get("qkv_bias", True), "moe": moe}


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    yield from parts.norms(shape, number)
    yield from parts.attention(shape, number)
    if parts.is_expert_layer(shape, number):
        yield from parts.experts(shape, number, shared="shared_expert")
    else:
        yield from parts.mlp(shape, number)


FAMILY = Family("qwen2_moe", read, layer)
