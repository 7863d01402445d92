"""DeepSeek-V2 and V2-Lite: latent attention, softmax router, shared experts, dense first layers."""

from __future__ import annotations

from fusionrl.models.families import parts
from fusionrl.models.families.deepseek_v3 import latent, layer
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "norm_topk_prob")
    if raw.get("topk_method", "greedy") != "greedy":
        # Megatron ranks groups by the sum of their best experts, this method by the best one.
        raise ValueError(f"topk_method {raw['topk_method']!r} is not supported for deepseek_v2; supported is greedy")
    moe = {
        "num_experts": parts.num_experts(raw),
        "topk": raw["num_experts_per_tok"],
        "ffn_hidden_size": raw["moe_intermediate_size"],
        "layers": tuple(range(raw.get("first_k_dense_replace", 0), raw["num_hidden_layers"])),
        "norm_topk_prob": False,
        "scaling_factor": raw.get("routed_scaling_factor") or 1.0,
        "shared_ffn_hidden_size": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
    }
    return parts.common(raw) | latent(raw) | {"moe": moe}


FAMILY = Family("deepseek_v2", read, layer)
