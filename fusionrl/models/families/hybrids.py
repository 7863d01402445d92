"""Families with several kinds of layers: gated delta nets or windows, and attention to all tokens every few layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fusionrl.models.families import parts
from fusionrl.models.families.llama import OLMO_NORMS, read_olmo2
from fusionrl.models.families.vision import read_stacked
from fusionrl.models.kinds import Attention, Delta, Experts, Full, Window
from fusionrl.models.rules import Family, HfConfig, MtpNames, Names, Published

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape


def read_qwen3_5(raw: HfConfig) -> dict[str, object]:
    """Qwen3.5 and 3.6, the text part."""
    parts.refuse(raw, "attention_bias")
    if not raw.get("attn_output_gate", True):
        raise ValueError(f"attn_output_gate false is not supported for {raw['model_type']}")
    if raw.get("output_gate_type") not in (None, "silu", "swish"):
        raise ValueError(f"output_gate_type {raw['output_gate_type']!r} is not supported; supported is swish")
    delta = Delta(
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
        conv_size=raw.get("linear_conv_kernel_dim", 4),
    )
    kinds: dict[str, Attention] = {"linear_attention": delta, "full_attention": Full(gated=True)}
    types = parts.layer_types(raw, "linear_attention", raw.get("full_attention_interval", 4))
    return parts.common(raw) | {
        "attention": [kinds[name] for name in types],
        "qk_layernorm": True,
        "zero_centered_norms": True,
        "head_dim": raw.get("head_dim") or 256,
        "rotary_percent": parts.partial_rotary(raw, 0.25),
    }


def read_qwen3_5_moe(raw: HfConfig) -> dict[str, object]:
    """The same with experts in every layer, one of them shared."""
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise ValueError("decoder_sparse_step and mlp_only_layers are not supported: every layer has experts")
    experts = Experts(
        num_experts=parts.num_experts(raw),
        topk=raw["num_experts_per_tok"],
        ffn_hidden_size=raw["moe_intermediate_size"],
        norm_topk_prob=raw.get("norm_topk_prob", True),
        shared_ffn_hidden_size=raw["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return read_qwen3_5({"intermediate_size": experts.ffn_hidden_size} | dict(raw)) | {"mlp": experts}


def _engine_fields(raw: HfConfig) -> dict[str, object]:
    """SGLang counts the layers of attention, and reads rotary embeddings outside of `rope_parameters`."""
    types = parts.layer_types(raw, "linear_attention", raw.get("full_attention_interval", 4))
    fields: dict[str, object] = {"partial_rotary_factor": parts.partial_rotary(raw, 0.25)}
    fields["rope_theta"] = parts.rope_theta(raw)
    fields["full_attention_interval"] = types.index("full_attention") + 1 if "full_attention" in types else len(types)
    return fields


def _unserved(shape: ModelShape) -> str | None:
    is_full = [isinstance(kind, Full) for kind in shape.attention]
    every = is_full.index(True) + 1 if True in is_full else 0
    if every and is_full == [(layer + 1) % every == 0 for layer in range(shape.num_layers)]:
        return None
    return "layer_types: SGLang gives attention to every so many layers, whatever they say"


_OTHERS = r"(visual|mtp)\..*"
_PACKED = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)}
_VISION = partial(read_stacked, token=248056, deepstack=())
_DENSE_FORM = Published("qwen3_5", _OTHERS, "Qwen3_5ForCausalLM", vision=_VISION)
_MIXED_FORM = Published("qwen3_5_moe", _OTHERS, "Qwen3_5MoeForCausalLM", packed=_PACKED, vision=_VISION)
_MTP = MtpNames("mtp.layers.0", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"))
_DENSE = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
_SPARSE = {"num_key_value_heads": 2, "max_position_embeddings": 32768}
_FAMILY = partial(
    Family,
    ignored=_OTHERS,
    engine_paths=(".self_attn.",),
    engine=_engine_fields,
    mtp=_MTP,
    unserved=_unserved,
    defaults=_SPARSE,
)
_MIXED = partial(parts.layer, names=Names(shared="shared_expert"))
_NEXT = partial(parts.layer, names=Names(shared="shared_expert", joins_delta=True))


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
    _FAMILY("qwen3_5_text", read_qwen3_5, parts.layer, published=_DENSE_FORM, defaults=_DENSE),
    _FAMILY("qwen3_5_moe_text", read_qwen3_5_moe, _MIXED, published=_MIXED_FORM),
    _FAMILY("qwen3_next", read_qwen3_5_moe, _NEXT, defaults=_SPARSE | {"intermediate_size": 5632}),
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
