"""Families most of whose layers attend within a window."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fusionrl.models.families import parts
from fusionrl.models.families.llama import OLMO_NORMS, read_olmo2
from fusionrl.models.kinds import Attention, Full, Window
from fusionrl.models.rules import Family, HfConfig, Names

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

_OLMO_THETA = 500000.0


def read_gemma3(raw: HfConfig) -> dict[str, object]:
    """Gemma 3, the text part: layers with a window have a base of rotary embeddings of their own."""
    parts.refuse(raw, "attention_bias", "attn_logit_softcapping", "final_logit_softcapping")
    parts.refuse(raw, "use_bidirectional_attention")
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation {activation!r} is not supported for gemma3_text")
    local = parts.rope_of(raw, "sliding_attention").get("rope_theta", raw.get("rope_local_base_freq", 10000.0))
    types = parts.layer_types(raw, "sliding_attention", raw.get("sliding_window_pattern", 6))
    kinds: dict[str, Attention] = {
        "sliding_attention": Window(size=parts.window_size(raw, types, 4096), rope_theta=local),
        "full_attention": Full(),
    }
    return parts.common(_flat(raw, 1e6)) | {
        "attention": [kinds[name] for name in types],
        "head_dim": raw.get("head_dim", 256),
        "qk_layernorm": True,
        "zero_centered_norms": True,
        "output_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "softmax_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }


def read_olmo3(raw: HfConfig) -> dict[str, object]:
    """OLMo 3: OLMo 2 with windows; rotary embeddings are scaled in the other layers alone."""
    flat = _flat(raw, _OLMO_THETA)
    fields = read_olmo2(flat)
    theta, local = fields["rope_theta"], parts.rope_of(raw, "sliding_attention").get("rope_theta", _OLMO_THETA)
    if theta != local:
        raise ValueError(f"rope_theta {theta} and {local} are not supported for olmo3: SGLang has one for all layers")
    types = parts.layer_types(raw, "sliding_attention", 4)
    kinds: dict[str, Attention] = {
        "sliding_attention": Window(size=parts.window_size(raw, types, 4096), rope_theta=local),
        "full_attention": Full(),
    }
    return fields | {"attention": [kinds[name] for name in types]}


def _flat(raw: HfConfig, theta: float) -> HfConfig:
    """The rotary embeddings of layers without a window at the top, with their base, which is `theta` if nothing says
    otherwise."""
    rope = parts.rope_of(raw, "full_attention")
    return {**raw, "rope_parameters": {"rope_theta": raw.get("rope_theta", theta), **rope}}


def _olmo3_engine(raw: HfConfig) -> dict[str, object]:
    """SGLang reads no nested rotary embeddings, and computes it by its OLMo 2."""
    fields = parts.common(_flat(raw, _OLMO_THETA)) | {"architectures": ["Olmo2ForCausalLM"]}
    names = ("rope_theta", "rope_scaling", "architectures")
    return {name: fields[name] for name in names if fields[name] is not None}


def _unserved_gemma3(shape: ModelShape) -> str | None:
    return None if shape.tie_word_embeddings else "tie_word_embeddings false: SGLang computes Gemma 3 by its embedding"


_GEMMA = {"num_key_value_heads": 4, "max_position_embeddings": 131072}
_GEMMA_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
FAMILIES = (
    Family(
        "gemma3_text",
        read_gemma3,
        partial(parts.layer, names=Names(norms=_GEMMA_NORMS)),
        engine_whole=("embed_tokens",),
        engine_copies=False,
        unserved=_unserved_gemma3,
        defaults=_GEMMA,
    ),
    Family(
        "olmo3",
        read_olmo3,
        partial(parts.layer, names=Names(norms=OLMO_NORMS)),
        engine=_olmo3_engine,
        yarn=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
)
