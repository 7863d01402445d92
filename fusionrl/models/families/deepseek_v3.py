"""DeepSeek-V3 and R1: latent attention, sigmoid router with groups and a balancing bias, dense first layers."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.glm4_moe import sigmoid_experts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def latent(raw: HfConfig) -> dict[str, object]:
    """Fields of `ModelShape` that latent attention adds."""
    parts.refuse(raw, "attention_bias", "mlp_bias")
    mla = {
        "q_lora_rank": raw.get("q_lora_rank"),
        "kv_lora_rank": raw["kv_lora_rank"],
        "qk_head_dim": raw["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": raw["qk_rope_head_dim"],
        "v_head_dim": raw["v_head_dim"],
    }
    heads = raw["num_attention_heads"]
    return {"mla": mla, "num_query_groups": heads, "head_dim": raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]}


def read(raw: HfConfig) -> dict[str, object]:
    if not raw.get("rope_interleave", True):
        raise ValueError("rope_interleave false is not supported")
    return parts.common(raw) | latent(raw) | {"moe": sigmoid_experts(raw)}


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    yield from parts.norms(shape, number)
    yield from parts.latent_attention(shape, number)
    if parts.is_expert_layer(shape, number):
        yield from parts.experts(shape, number)
    else:
        yield from parts.mlp(shape, number)


# The layer after the last predicts further tokens; nothing here trains it.
FAMILY = Family("deepseek_v3", read, layer, ignored=r"model\.layers\.{num_layers}\..*")
