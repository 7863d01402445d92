"""Mixtral: Llama's attention and routed experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def read(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "sliding_window")
    moe = {
        "num_experts": parts.num_experts(raw),
        "topk": raw["num_experts_per_tok"],
        "ffn_hidden_size": raw["intermediate_size"],
        "layers": tuple(range(raw["num_hidden_layers"])),
        "norm_topk_prob": True,
    }
    return parts.common(raw) | {"moe": moe}


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    yield from parts.norms(shape, number)
    yield from parts.attention(shape, number)
    yield from parts.experts(shape, number, "block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = Family("mixtral", read, layer)
