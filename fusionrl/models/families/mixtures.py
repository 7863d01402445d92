"""The families with mixtures of experts: Mixtral, Qwen's, GLM's, MiniMax's, gpt-oss, and those with latent attention.

Kimi-K2 and GLM-4.7-Flash are DeepSeek-V3 by other names; so are DeepSeek-V3.2 and GLM-5 where texts are short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fusionrl.models.families import parts
from fusionrl.models.kinds import Attention, Dense, Experts, Full, Latent, Mlp, Window
from fusionrl.models.rules import Family, HfConfig, Names

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

# Layers after the last predict further tokens.
_FURTHER_TOKENS = r"model\.layers\.({further})\..*"
_INDEXERS = rf"{_FURTHER_TOKENS}|.*\.self_attn\.indexer\..*"


def read_mixtral(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "sliding_window")
    experts = _experts(raw, raw["intermediate_size"]) | {"norm_topk_prob": True}
    return parts.common(raw) | {"mlp": Experts.model_validate(experts)}


def read_qwen2_moe(raw: HfConfig) -> dict[str, object]:
    shared = {"shared_ffn_hidden_size": raw["shared_expert_intermediate_size"], "shared_gate": True}
    return parts.common(raw) | {"attention_bias": raw.get("qkv_bias", True), "mlp": _qwen_layers(raw, shared)}


def read_qwen3_moe(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    return parts.common(raw) | {"qk_layernorm": True, "mlp": _qwen_layers(raw, {})}


def read_glm4_moe(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {
        "attention_bias": raw.get("attention_bias", False),
        "qk_layernorm": raw.get("use_qk_norm", False),
        "rotary_percent": parts.partial_rotary(raw, 0.5),
        "mlp": _sigmoid_layers(raw),
    }


def read_deepseek_v2(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "norm_topk_prob")
    if raw.get("topk_method", "greedy") != "greedy":
        # Megatron ranks groups by the sum of their best experts, this method by the best one.
        raise ValueError(f"topk_method {raw['topk_method']!r} is not supported for deepseek_v2; supported is greedy")
    return parts.common(raw) | _latent(raw) | {"mlp": _after_dense(raw, {"norm_topk_prob": False})}


def read_deepseek_v3(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "index_topk")  # with which SGLang's class would choose keys
    return _deepseek(raw)


def _deepseek(raw: HfConfig) -> dict[str, object]:
    if not raw.get("rope_interleave", True):
        raise ValueError("rope_interleave false is not supported")
    return parts.common(raw) | _latent(raw) | {"mlp": _sigmoid_layers(raw)}


def read_sparse(raw: HfConfig) -> dict[str, object]:
    """DeepSeek-V3.2 and GLM-5: an indexer chooses `index_topk` keys, so up to as many tokens they are DeepSeek-V3."""
    return _deepseek(raw) | {"max_position_embeddings": _dense_positions(raw)}


def _dense_positions(raw: HfConfig) -> int:
    return min(raw["max_position_embeddings"], raw["index_topk"])


def read_minimax_m2(raw: HfConfig) -> dict[str, object]:
    """MiniMax-M2: norms of queries and keys over all heads, a part of each head is rotated, and no expert is shared."""
    parts.refuse(raw, "shared_intermediate_size")
    for name, usual in (("use_qk_norm", True), ("use_routing_bias", True), ("qk_norm_type", "per_layer")):
        if raw.get(name, usual) != usual:
            raise ValueError(f"{name} {raw[name]!r} is not supported for minimax_m2; supported is {usual!r}")
    if set(raw.get("attn_type_list") or [1]) != {1}:
        raise ValueError("attn_type_list is not supported for minimax_m2 with layers of linear attention")
    router = {"norm_topk_prob": True, "score_function": "sigmoid", "expert_bias": True}
    return parts.common(raw) | {
        "head_dim": raw.get("head_dim") or 128,
        "qk_layernorm": True,
        "width_norm": True,
        "rotary_percent": _minimax_rotary(raw),
        "mlp": Experts.model_validate(_experts(raw, raw["intermediate_size"]) | router),
    }


def _minimax_rotary(raw: HfConfig) -> float:
    """The share of a head that is rotated; published folders have its size."""
    size = raw.get("rotary_dim")
    return parts.partial_rotary(raw, 1.0 if size is None else size / (raw.get("head_dim") or 128))


def _minimax_engine(raw: HfConfig) -> dict[str, object]:
    """Without these fields SGLang has no norms of queries and keys and no balancing bias, and rotates whole heads."""
    rotary = int((raw.get("head_dim") or 128) * _minimax_rotary(raw))
    fields: dict[str, object] = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
    return fields | {"rotary_dim": rotary}


def read_gpt_oss(raw: HfConfig) -> dict[str, object]:
    """gpt-oss: biases everywhere, sinks, a window in every second layer, and a gate of its own."""
    for name, usual in (("attention_bias", True), ("swiglu_alpha", 1.702)):
        if raw.get(name, usual) != usual:
            raise ValueError(f"{name} {raw[name]!r} is not supported for gpt_oss; supported is {usual!r}")
    types = parts.layer_types(raw, "sliding_attention", 2)
    kinds: dict[str, Attention] = {
        "sliding_attention": Window(size=parts.window_size(raw, types, 128), sinks=True, output_bias=True),
        "full_attention": Full(sinks=True, output_bias=True),
    }
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = {**raw, "rope_parameters": {"rope_theta": raw["rope_theta"], **_GPT_OSS_ROPE}}
    router = {"norm_topk_prob": True, "bias": True, "glu_limit": raw.get("swiglu_limit", 7.0)}
    return parts.common(raw) | {
        "attention": [kinds[name] for name in types],
        "head_dim": raw.get("head_dim") or 64,
        "attention_bias": True,
        "activation": "quick_gelu",
        "mlp": Experts.model_validate(_experts(raw, raw["intermediate_size"]) | router),
    }


def _experts(raw: HfConfig, width: int) -> dict[str, object]:
    """Fields of `Experts` that every mixture has."""
    return {"num_experts": parts.num_experts(raw), "topk": raw["num_experts_per_tok"], "ffn_hidden_size": width}


def _qwen_layers(raw: HfConfig, shared: dict[str, object]) -> list[Mlp]:
    """Every `decoder_sparse_step`-th layer has experts, but those of `mlp_only_layers`."""
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    experts = _experts(raw, raw["moe_intermediate_size"]) | {"norm_topk_prob": raw.get("norm_topk_prob", False)}
    mixture = Experts.model_validate(experts | shared)
    layers = range(raw["num_hidden_layers"])
    return [mixture if i not in dense and (i + 1) % step == 0 else Dense() for i in layers]


def _after_dense(raw: HfConfig, router: dict[str, object]) -> list[Mlp]:
    """Experts in the layers after the first dense ones, with shared experts."""
    experts = _experts(raw, raw["moe_intermediate_size"]) | {
        "scaling_factor": raw.get("routed_scaling_factor") or 1.0,
        "shared_ffn_hidden_size": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
    }
    mixture, num_dense = Experts.model_validate(experts | router), raw.get("first_k_dense_replace", 0)
    kinds = raw.get("mlp_layer_types") or [
        "sparse" if i >= num_dense else "dense" for i in range(raw["num_hidden_layers"])
    ]
    return [mixture if kind == "sparse" else Dense() for kind in kinds]


def _sigmoid_layers(raw: HfConfig) -> list[Mlp]:
    """A router as DeepSeek-V3's (arXiv:2412.19437, section 2.1.2): groups, and a bias that balances it."""
    if not raw.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob false is not supported with a sigmoid router")
    groups, chosen, topk = raw.get("n_group") or 1, raw.get("topk_group") or 1, raw["num_experts_per_tok"]
    if groups > 1 and topk // chosen != 2:
        # These models rank a group by its two best experts, Megatron by as many as a chosen group gives on average.
        raise ValueError(f"num_experts_per_tok {topk} with topk_group {chosen} is not supported; supported is twice it")
    router = {"norm_topk_prob": True, "score_function": "sigmoid", "expert_bias": True}
    return _after_dense(raw, router | {"num_groups": groups, "group_topk": chosen})


def _latent(raw: HfConfig) -> dict[str, object]:
    """Fields of `ModelShape` that latent attention adds."""
    parts.refuse(raw, "attention_bias", "mlp_bias")
    latent = Latent(
        q_lora_rank=raw.get("q_lora_rank"),
        kv_lora_rank=raw["kv_lora_rank"],
        qk_head_dim=raw["qk_nope_head_dim"],
        qk_pos_emb_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw["v_head_dim"],
        index_topk=raw.get("index_topk"),
    )
    heads, head_dim = raw["num_attention_heads"], raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    return {"attention": latent, "num_query_groups": heads, "head_dim": head_dim}


# What SGLang's DeepSeek asks of its router and transformers' classes do not know.
_GROUPS: dict[str, object] = {"moe_layer_freq": 1, "n_group": 1, "topk_group": 1}
_GREEDY = _GROUPS | {"scoring_func": "softmax", "topk_method": "greedy"}
_BALANCED = _GROUPS | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_MIXTRAL = Names(experts="block_sparse_moe", expert=("w1", "w3", "w2"))
_MINIMAX = replace(_MIXTRAL, score_bias="e_score_correction_bias")


def _engine(fields: dict[str, object]) -> Callable[[HfConfig], dict[str, object]]:
    """Fields for folders that lack them."""
    return lambda raw: {name: value for name, value in fields.items() if raw.get(name) is None}


def _balanced_engine(raw: HfConfig) -> dict[str, object]:
    """Also how many layers are dense: GLM-4.7-Flash's class of transformers saves the type of each."""
    types = raw.get("mlp_layer_types")
    return _engine(_BALANCED)(raw) | ({"first_k_dense_replace": types.count("dense")} if types else {})


def _dense_engine(raw: HfConfig) -> dict[str, object]:
    """SGLang's DeepSeek-V3, which leaves the indexers' tensors in their files; its class has defaults of its own."""
    defaults = {name: raw[name] for name in _DEEPSEEK_V32 | _GLM5 if name in raw}
    served = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "index_topk": None}
    return defaults | _balanced_engine(raw) | served | {"max_position_embeddings": _dense_positions(raw)}


def _unserved_latent(shape: ModelShape) -> str | None:
    num_dense = shape.num_layers - len(shape.expert_layers)
    if shape.expert_layers == tuple(range(num_dense, shape.num_layers)):
        return None
    return "mlp_layer_types: SGLang has dense layers first, whatever they say"


def _unserved(shape: ModelShape) -> str | None:
    if len(shape.expert_layers) == shape.num_layers:
        return None
    return "decoder_sparse_step and mlp_only_layers: SGLang gives every layer experts, whatever they say"


# What transformers' classes take for fields that config.json lacks, where Llama's takes something else.
_LONG, _EPS = {"max_position_embeddings": 131072}, {"rms_norm_eps": 1e-5}
_QWEN2 = {"num_key_value_heads": 16, "max_position_embeddings": 32768}
_QWEN3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
_MIXTRAL_8X7B = _LONG | _EPS | {"num_key_value_heads": 8, "rope_theta": 1e6}
_ONE_SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1}
_GLM4 = _LONG | _EPS | _ONE_SHARED | {"num_key_value_heads": 8}
_DEEPSEEK_V2 = {"q_lora_rank": 1536, "n_shared_experts": 2}
_DEEPSEEK_V3: dict[str, float] = {
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
_DEEPSEEK_V3 |= {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_GLM4_LITE = _EPS | _ONE_SHARED | {"q_lora_rank": 768, "max_position_embeddings": 202752, "routed_scaling_factor": 1.8}
_DEEPSEEK_V32 = _DEEPSEEK_V3 | {"max_position_embeddings": 163840, "index_topk": 2048}
_GLM5 = _EPS | {"q_lora_rank": 2048, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1}
_MINIMAX_M2 = {"num_key_value_heads": 8, "max_position_embeddings": 196608, "rope_theta": 5e6}
_GPT_OSS = _LONG | _EPS | {"num_key_value_heads": 8, "rope_theta": 150000.0}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}


FAMILIES = (
    Family(
        "qwen2_moe",
        read_qwen2_moe,
        partial(parts.layer, names=Names(shared="shared_expert")),
        yarn=True,
        unserved=_unserved,
        defaults=_QWEN2,
    ),
    Family("qwen3_moe", read_qwen3_moe, parts.layer, yarn=True, unserved=_unserved, defaults=_QWEN3),
    Family("mixtral", read_mixtral, partial(parts.layer, names=_MIXTRAL), defaults=_MIXTRAL_8X7B),
    Family("glm4_moe", read_glm4_moe, parts.layer, _FURTHER_TOKENS, mtp=parts.APPENDED, defaults=_GLM4),
    Family("deepseek_v2", read_deepseek_v2, parts.layer, engine=_engine(_GREEDY), defaults=_DEEPSEEK_V2),
    *(
        Family(
            name,
            read_deepseek_v3,
            parts.layer,
            _FURTHER_TOKENS,
            engine=_balanced_engine,
            mtp=parts.APPENDED,
            unserved=_unserved_latent,
            defaults=defaults,
        )
        for name, defaults in (
            ("deepseek_v3", _DEEPSEEK_V3),
            ("kimi_k2", _DEEPSEEK_V3),
            ("glm4_moe_lite", _GLM4_LITE),
        )
    ),
    *(
        Family(name, read_sparse, parts.layer, _INDEXERS, engine=_dense_engine, unserved=_unserved_latent, defaults=d)
        for name, d in (("deepseek_v32", _DEEPSEEK_V32), ("glm_moe_dsa", _DEEPSEEK_V32 | _GLM5))
    ),
    Family(
        "minimax_m2",
        read_minimax_m2,
        partial(parts.layer, names=_MINIMAX),
        engine=_minimax_engine,
        engine_rows=("q_norm", "k_norm"),
        engine_fp32=("block_sparse_moe.gate.weight",),
        defaults=_MINIMAX_M2,
    ),
    Family(
        "gpt_oss",
        read_gpt_oss,
        partial(parts.layer, names=Names(router="router", stacks=True)),
        engine_fp32=("experts.gate_up_proj_bias", "experts.down_proj_bias"),
        yarn=True,
        defaults=_GPT_OSS,
    ),
)
