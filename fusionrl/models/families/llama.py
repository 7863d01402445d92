"""Llama 2 and 3, SmolLM2 and what else config.json calls llama, and the dense families that are near it.

Each reads what its config.json says beyond Llama's, and names the tensors that are called otherwise.
"""

from functools import partial

from fusionrl.models.families import parts
from fusionrl.models.kinds import Full
from fusionrl.models.rules import Family, HfConfig, MtpNames, Names

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


def read_phi3(raw: HfConfig) -> dict[str, object]:
    parts.refuse_window(raw)
    parts.refuse(raw, "attention_bias")
    return parts.common(raw) | {"rotary_percent": parts.partial_rotary(raw, 1.0)}


def _phi3_engine(raw: HfConfig) -> dict[str, object]:
    """SGLang rotates whole heads where transformers 5 has saved the share in `rope_parameters` alone."""
    share = parts.partial_rotary(raw, 1.0)
    return {"partial_rotary_factor": share} if share != 1.0 else {}


def read_olmo2(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    norms = {"qk_layernorm": True, "width_norm": True, "input_norms": False, "output_norms": True}
    return parts.common(raw) | norms


def read_smollm3(raw: HfConfig) -> dict[str, object]:
    """Every fourth layer has no rotary embeddings."""
    parts.refuse(raw, "attention_bias", "mlp_bias")
    interval, layers = raw.get("no_rope_layer_interval", 4), range(raw["num_hidden_layers"])
    turned = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
    return parts.common(raw) | {
        "attention": [Full(rope=bool(turns)) for turns in turned],
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }


def read_granite(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias", "mlp_bias")
    return parts.common(raw) | {
        "embedding_scale": raw.get("embedding_multiplier", 1.0),
        "softmax_scale": raw.get("attention_multiplier", 1.0),
        "residual_scale": raw.get("residual_multiplier", 1.0),
        "logits_scale": raw.get("logits_scaling", 1.0),
    }


_MIMO = MtpNames(
    "model.mtp_layers.{number}",
    (
        "model.mtp_layers.{number}.hidden_layernorm",
        "model.mtp_layers.{number}.token_layernorm",
        "model.mtp_layers.{number}.input_proj",
        "model.mtp_layers.{number}.final_layernorm",
    ),
    most=8,
    hidden_first=True,
)
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_GLM4 = {"num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07}
_PHI3 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_SMOLLM3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6}
OLMO_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
FAMILIES = (
    Family("llama", read, layer),
    Family("qwen2", read_qwen2, layer, yarn=True, defaults=_QWEN),
    Family("qwen3", read_qwen3, layer, yarn=True, defaults=_QWEN),
    Family("glm4", read_glm4, partial(layer, names=Names(gate_up="gate_up_proj")), defaults=_GLM4),
    Family(
        "phi3",
        read_phi3,
        partial(layer, names=Names(qkv="qkv_proj", gate_up="gate_up_proj")),
        engine=_phi3_engine,
        defaults=_PHI3,
    ),
    Family("olmo2", read_olmo2, partial(layer, names=Names(norms=OLMO_NORMS)), defaults={"rms_norm_eps": 1e-5}),
    Family("smollm3", read_smollm3, layer, engines_join=False, defaults=_SMOLLM3),
    Family("granite", read_granite, layer),
    Family("mimo", read_qwen2, layer, r"model\.mtp_layers\..*", mtp=_MIMO, defaults=_QWEN),
)
