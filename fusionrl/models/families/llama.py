"""Llama 2 and 3, SmolLM2 and what else config.json calls llama."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias", "mlp_bias")
    return parts.common(raw)


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    yield from parts.norms(shape, number)
    yield from parts.attention(shape, number)
    yield from parts.mlp(shape, number)


FAMILY = Family("llama", read, layer)
