"""Qwen3-MoE: Qwen3's attention, routed experts, none shared."""

from __future__ import annotations

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.qwen2_moe import layer, sparse_layers
from fusionrl.models.families.rules import Family


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    moe = {
        "num_experts": parts.num_experts(raw),
        "topk": raw["num_experts_per_tok"],
        "ffn_hidden_size": raw["moe_intermediate_size"],
        "layers": sparse_layers(raw),
        "norm_topk_prob": raw.get("norm_topk_prob", False),
    }
    return parts.common(raw) | {"qk_layernorm": True, "moe": moe}


FAMILY = Family("qwen3_moe", read, layer)
