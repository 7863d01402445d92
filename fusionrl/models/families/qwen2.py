"""Qwen2 and Qwen2.5: Llama's layer with biases of query, key and value."""

from __future__ import annotations

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.llama import layer
from fusionrl.models.families.rules import Family


def read(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {"attention_bias": True}


FAMILY = Family("qwen2", read, layer)
