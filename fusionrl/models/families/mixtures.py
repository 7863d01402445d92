"""The families with mixtures of experts: Mixtral, Qwen's, GLM-4.5 and 4.6, and DeepSeek's with latent attention."""

from functools import partial

from fusionrl.models.families import parts
from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Family

# The layer after the last predicts further tokens; nothing here trains it.
_FURTHER_TOKENS = r"model\.layers\.{num_layers}\..*"


def read_mixtral(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "sliding_window")
    moe = _experts(raw, raw["intermediate_size"], range(raw["num_hidden_layers"])) | {"norm_topk_prob": True}
    return parts.common(raw) | {"moe": moe}


def read_qwen2_moe(raw: HfConfig) -> dict[str, object]:
    shared = {"shared_ffn_hidden_size": raw["shared_expert_intermediate_size"], "shared_gate": True}
    return parts.common(raw) | {"attention_bias": raw.get("qkv_bias", True), "moe": _qwen_experts(raw) | shared}


def read_qwen3_moe(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "attention_bias")
    return parts.common(raw) | {"qk_layernorm": True, "moe": _qwen_experts(raw)}


def read_glm4_moe(raw: HfConfig) -> dict[str, object]:
    return parts.common(raw) | {
        "attention_bias": raw.get("attention_bias", False),
        "qk_layernorm": raw.get("use_qk_norm", False),
        "rotary_percent": parts.partial_rotary(raw, 0.5),
        "moe": _sigmoid_experts(raw),
    }


def read_deepseek_v2(raw: HfConfig) -> dict[str, object]:
    parts.refuse(raw, "norm_topk_prob")
    if raw.get("topk_method", "greedy") != "greedy":
        # Megatron ranks groups by the sum of their best experts, this method by the best one.
        raise ValueError(f"topk_method {raw['topk_method']!r} is not supported for deepseek_v2; supported is greedy")
    return parts.common(raw) | _latent(raw) | {"moe": _after_dense(raw) | {"norm_topk_prob": False}}


def read_deepseek_v3(raw: HfConfig) -> dict[str, object]:
    if not raw.get("rope_interleave", True):
        raise ValueError("rope_interleave false is not supported")
    return parts.common(raw) | _latent(raw) | {"moe": _sigmoid_experts(raw)}


def _experts(raw: HfConfig, width: int, layers: range | list[int]) -> dict[str, object]:
    """Fields of `MoEShape` that every mixture has."""
    return {
        "num_experts": parts.num_experts(raw),
        "topk": raw["num_experts_per_tok"],
        "ffn_hidden_size": width,
        "layers": tuple(layers),
    }


def _qwen_experts(raw: HfConfig) -> dict[str, object]:
    """Every `decoder_sparse_step`-th layer has experts, but those of `mlp_only_layers`."""
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    layers = [i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
    return _experts(raw, raw["moe_intermediate_size"], layers) | {"norm_topk_prob": raw.get("norm_topk_prob", False)}


def _after_dense(raw: HfConfig) -> dict[str, object]:
    """Experts in the layers after the first dense ones, with shared experts."""
    layers = range(raw.get("first_k_dense_replace", 0), raw["num_hidden_layers"])
    return _experts(raw, raw["moe_intermediate_size"], layers) | {
        "scaling_factor": raw.get("routed_scaling_factor") or 1.0,
        "shared_ffn_hidden_size": raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
    }


def _sigmoid_experts(raw: HfConfig) -> dict[str, object]:
    """A router as DeepSeek-V3's (arXiv:2412.19437, section 2.1.2): groups, and a bias that balances it."""
    if not raw.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob false is not supported with a sigmoid router")
    groups, chosen, topk = raw.get("n_group") or 1, raw.get("topk_group") or 1, raw["num_experts_per_tok"]
    if groups > 1 and topk // chosen != 2:
        # These models rank a group by its two best experts, Megatron by as many as a chosen group gives on average.
        raise ValueError(f"num_experts_per_tok {topk} with topk_group {chosen} is not supported; supported is twice it")
    return _after_dense(raw) | {
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": groups,
        "group_topk": chosen,
    }


def _latent(raw: HfConfig) -> dict[str, object]:
    """Fields of `ModelShape` that latent attention adds."""
    parts.refuse(raw, "attention_bias", "mlp_bias")
    mla = {
        "q_lora_rank": raw.get("q_lora_rank"),
        "kv_lora_rank": raw["kv_lora_rank"],
        "qk_head_dim": raw["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": raw["qk_rope_head_dim"],
        "v_head_dim": raw["v_head_dim"],
    }
    heads = raw["num_attention_heads"]
    return {"mla": mla, "num_query_groups": heads, "head_dim": raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]}


_MIXTRAL = parts.Names(experts="block_sparse_moe", expert=("w1", "w3", "w2"))
FAMILIES = (
    Family("qwen2_moe", read_qwen2_moe, partial(parts.layer, names=parts.Names(shared="shared_expert"))),
    Family("qwen3_moe", read_qwen3_moe, parts.layer),
    Family("mixtral", read_mixtral, partial(parts.layer, names=_MIXTRAL)),
    Family("glm4_moe", read_glm4_moe, parts.layer, ignored=_FURTHER_TOKENS),
    Family("deepseek_v2", read_deepseek_v2, parts.layer),
    Family("deepseek_v3", read_deepseek_v3, parts.layer, ignored=_FURTHER_TOKENS),
)
