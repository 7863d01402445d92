"""Llama 2 and 3, SmolLM2 and what else config.json calls llama, and the dense families that are near it."""

from functools import partial

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family

layer = parts.layer


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias", "mlp_bias")
    return parts.common(raw)


def read_qwen2(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {"attention_bias": True}


def read_qwen3(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    return parts.common(raw) | {"qk_layernorm": True, "head_dim": raw.get("head_dim") or 128}


def read_glm4(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {
        "head_dim": raw.get("head_dim") or 128,
        "attention_bias": raw.get("attention_bias", True),
        "rotary_percent": parts.partial_rotary(raw, 0.5),
        "rotary_interleaved": True,
        "output_norms": True,
    }


FAMILIES = (
    Family("llama", read, layer),
    Family("qwen2", read_qwen2, layer),
    Family("qwen3", read_qwen3, layer),
    Family("glm4", read_glm4, partial(layer, names=parts.Names(gate_up="gate_up_proj"))),
)
