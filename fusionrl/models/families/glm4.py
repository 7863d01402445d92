"""GLM-4 (glm4): norms also after attention and after the MLP, half of each head rotated, pairs of neighbours."""

from __future__ import annotations

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family, Rule
from fusionrl.models.shape import ModelShape


def read(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {
        "head_dim": raw.get("head_dim") or 128,
        "attention_bias": raw.get("attention_bias", True),
        "rotary_percent": parts.partial_rotary(raw, 0.5),
        "rotary_interleaved": True,
        "output_norms": True,
    }


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    to, of = f"decoder.layers.{number}", f"model.layers.{number}"
    h, f = shape.hidden_size, shape.ffn_hidden_size
    yield from parts.norms(shape, number)
    yield from parts.attention(shape, number)
    yield parts.norm(f"{to}.self_attention.output_norm", f"{of}.post_self_attn_layernorm", h)
    # Its checkpoints have gate and up in one tensor already.
    yield Rule(f"{to}.mlp.linear_fc1.weight", {f"{of}.mlp.gate_up_proj.weight": (2 * f, h)}, split="paired_rows")
    yield Rule(f"{to}.mlp.linear_fc2.weight", {f"{of}.mlp.down_proj.weight": (h, f)}, split="columns")
    yield parts.norm(f"{to}.mlp.output_norm", f"{of}.post_mlp_layernorm", h)


FAMILY = Family("glm4", read, layer)
