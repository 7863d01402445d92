"""Qwen3: Llama's layer with norms of queries and keys."""

from __future__ import annotations

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.llama import layer
from fusionrl.models.families.rules import Family


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    return parts.common(raw) | {"qk_layernorm": True, "head_dim": raw.get("head_dim") or 128}


FAMILY = Family("qwen3", read, layer)
