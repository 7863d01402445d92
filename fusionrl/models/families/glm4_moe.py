"""GLM-4.5 and 4.6 (glm4_moe): sigmoid router with a bias that balances it, shared experts, dense first layers."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def sigmoid_experts(raw: HfConfig) -> dict[str, object]:
    """Fields of `MoEShape` for a router as DeepSeek-V3's (arXiv:2412.19437, section 2.1.2)."""
    if not raw.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob false is not supported with a sigmoid router")
    groups, chosen, topk = raw.get("n_group") or 1, raw.get("topk_group") or 1, raw["num_experts_per_tok"]
    if groups > 1 and topk // chosen != 2:
        # These models rank a group by its two best experts, Megatron by as many as a chosen group gives on average.
        raise ValueError(f"num_experts_per_tok {topk} with topk_group {chosen} is not supported; supported is twice it")
    first = raw.get("first_k_dense_replace", 0)
    return {
        "num_experts": parts.num_experts(raw),
        "topk": topk,
        "ffn_hidden_size": raw["moe_intermediate_size"],
        "layers": tuple(range(first, raw["num_hidden_layers"])),
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "expert_bias": True,
        "scaling_factor": raw.get("routed_scaling_factor") or 1.0,
        "num_groups": groups,
        "group_topk": chosen,
        "shared_ffn_hidden_size": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
    }


def read(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {
        "attention_bias": raw.get("attention_bias", False),
        "qk_layernorm": raw.get("use_qk_norm", False),
        "rotary_percent": parts.partial_rotary(raw, 0.5),
        "moe": sigmoid_experts(raw),
    }


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    yield from parts.norms(shape, number)
    yield from parts.attention(shape, number)
    if parts.is_expert_layer(shape, number):
        yield from parts.experts(shape, number)
    else:
        yield from parts.mlp(shape, number)


# The layer after the last predicts further tokens; nothing here trains it.
FAMILY = Family("glm4_moe", read, layer, ignored=r"model\.layers\.{num_layers}\..*")
