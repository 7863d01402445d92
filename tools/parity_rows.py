"""The models and layouts of `tools/parity.py`."""

from dataclasses import dataclass, field
from typing import Any

from fusionrl.plan.layout import TrainerLayout

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
WINDOW: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
SHARED = {"shared_expert_intermediate_size": 48}
KNOWN_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families that transformers has under another name."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3 tied": {"head_dim": 24, "tie_word_embeddings": True},
    "glm4": {"head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"head_dim": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": SIGMOID | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": LATENT
    | EXPERTS
    | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": LATENT | SIGMOID,
    "deepseek_v3 dense": LATENT | SIGMOID | {"first_k_dense_replace": 4},
    # transformers takes 1e-6 in the norms of the compressed parts, whatever config.json says.
    "glm4_moe_lite": LATENT | SIGMOID | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
    "kimi_k2": LATENT | SIGMOID | {"n_group": 1, "topk_group": 1},
    "mimo": {},
    "phi3": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "olmo2": {},
    "smollm3": {},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | EXPERTS | SHARED,
    "qwen3_next": HYBRID | EXPERTS | SHARED,
    "gemma3_text": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 24},
    "olmo3": WINDOW,
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "swiglu_limit": 1.0,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
}


SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"layers": 4},
    "qwen3_vl": {"layers": 4},
    "qwen3_vl deep": {"layers": 8},
    "qwen3_vl_moe": {"layers": 6},
    "qwen3_vl_moe deep": {"layers": 12},
    "qwen3_5": {"layers": 4},
    "qwen3_5_moe": {"layers": 4},
    "kimi_vl": {"layers": 4},
}
"""Models that see (`tests/tiny_vision.py`), trained on texts and images."""


LORA: dict[str, dict[str, Any]] = {
    **{f"{model} lora": {"lora_rank": 4} for model in (*MODELS, "qwen3_vl", "qwen3_5_moe")},
    "qwen3 lora of q and v": {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]},
    "qwen3_moe lora of experts": {"lora_rank": 4, "target_modules": ["linear_fc1", "down_proj"]},
    "deepseek_v3 lora of latents": {
        "lora_rank": 4,
        "lora_use_rslora": True,
        "target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "down_proj"],
    },
}
"""Flags of models whose adapters are trained."""


def without_adapters(model: str) -> str:
    """Return the model of MODELS or SEEING that has the adapters."""
    return model.partition(" lora")[0]


@dataclass(frozen=True)
class Row:
    """One layout of one model, with further fields for Megatron and flags of the run."""

    model: str
    world: int
    sizes: dict[str, int] = field(default_factory=dict)
    note: str = ""
    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> TrainerLayout:
        sizes = dict(self.sizes)
        sizes.setdefault("etp", sizes.get("tp", 1) if "ep" in sizes else 1)
        return TrainerLayout(self.world, **sizes)

    @property
    def name(self) -> str:
        layout = self.layout
        parts = [f"{axis.upper()} {size}" for axis, size in self.sizes.items()]
        if layout.dp > 1:
            parts.append(f"DP {layout.dp}")
        return " ".join(parts) + (f", {self.note}" if self.note else "")


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# Layouts of two ranks that every such model has; windows and sinks are not divided over a sequence's pieces.
WINDOWED: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"pp": 2})
DENSE = (*WINDOWED, {"cp": 2})
MIXED = (*DENSE, {"ep": 2})
# A bucket for each parameter: what waits for none, or is ready in another order on some rank, ends the run.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}
ROWS = [
    Row("qwen3", 2),
    Row("qwen3", 2, note="overlapped", ddp=OVERLAP),
    Row("qwen3", 2, note="full recompute", transformer=FULL),
    Row("qwen3", 2, {"tp": 2}),
    Row("qwen3", 2, {"tp": 2}, "no sequence parallel", {"sequence_parallel": False}),
    Row("qwen3", 2, {"tp": 2}, "selective recompute", selective("core_attn", "mlp", "layernorm")),
    Row("qwen3 tied", 2, {"tp": 2}),
    Row("qwen3", 2, {"pp": 2}),
    Row("qwen3 tied", 2, {"pp": 2}),
    Row("qwen3", 2, {"pp": 2}, "uneven stages", {"num_layers_in_first_pipeline_stage": 1}),
    Row("qwen3", 2, {"pp": 2, "vpp": 2}),
    Row("qwen3 tied", 2, {"pp": 2, "vpp": 2}),
    Row("qwen3", 2, {"cp": 2}),
    Row("llama", 2, {"tp": 2}),
    Row("qwen2", 2, {"tp": 2}),
    Row("glm4", 2, {"tp": 2}),
    Row("glm4", 2, {"pp": 2}),
    Row("qwen3_moe", 2, {"ep": 2}),
    Row("qwen3_moe", 2, {"ep": 2}, "experts recomputed", selective("moe")),
    Row("qwen2_moe", 2, {"tp": 2}),
    Row("qwen2_moe", 2, {"ep": 2}),
    Row("mixtral", 2, {"tp": 2}),
    Row("mixtral", 2, {"ep": 2}),
    Row("mixtral", 2, {"pp": 2}),
    Row("glm4_moe", 2, {"tp": 2}),
    Row("glm4_moe", 2, {"ep": 2}),
    Row("deepseek_v2", 2, {"tp": 2}),
    Row("deepseek_v2", 2, {"ep": 2}),
    Row("deepseek_v3", 2, {"tp": 2}),
    Row("deepseek_v3 dense", 2, {"tp": 2}),
    Row("deepseek_v3", 2, {"ep": 2}),
    Row("deepseek_v3", 2, {"pp": 2}),
    Row("deepseek_v3", 2, {"cp": 2}),
    *(Row(model, 2, sizes) for model in ("phi3", "olmo2", "smollm3", "granite", "mimo") for sizes in DENSE),
    *(Row(model, 2, sizes) for model in ("gemma3_text", "olmo3") for sizes in WINDOWED),
    *(Row("qwen3_5_text", 2, sizes) for sizes in (*DENSE, {"pp": 2, "vpp": 2})),
    *(Row(model, 2, sizes) for model in ("kimi_k2", "glm4_moe_lite", "minimax_m2") for sizes in MIXED),
    *(Row(model, 2, sizes) for model in ("qwen3_5_moe_text", "qwen3_next") for sizes in MIXED),
    *(Row("gpt_oss", 2, sizes) for sizes in (*WINDOWED, {"ep": 2})),
    Row("olmo2", 2, {"tp": 2}, "no sequence parallel", {"sequence_parallel": False}),
    Row("smollm3", 2, {"pp": 2, "vpp": 2}),
    Row("qwen3_5_text", 2, note="full recompute", transformer=FULL),
    Row("granite", 2, note="full recompute", transformer=FULL),
    Row("gemma3_text", 2, {"pp": 2, "vpp": 2}),
    Row("gemma3_text", 2, note="full recompute", transformer=FULL),
    *(Row(model, 2, sizes) for model in ("qwen2_5_vl", "qwen3_vl", "qwen3_5") for sizes in DENSE),
    *(Row(model, 2, sizes) for model in ("qwen3_vl_moe", "qwen3_5_moe", "kimi_vl") for sizes in MIXED),
    *(Row(model, 2, note="overlapped", ddp=OVERLAP) for model in SEEING if "deep" not in model),
    *(Row(model, 2, {"tp": 2}, "full recompute", FULL) for model in SEEING if "deep" not in model),
    *(Row(model, 2, {"pp": 2}, "full recompute", FULL) for model in SEEING if "deep" not in model),
    *(
        Row(model, 2, {"tp": 2}, "towers kept", flags={"vision_recompute": False})
        for model in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    ),
    *(
        Row(model, 2, {"pp": 2, "vpp": 2})
        for model in ("qwen2_5_vl", "qwen3_vl deep", "qwen3_vl_moe deep", "qwen3_5", "kimi_vl")
    ),
    Row("qwen3", 4),
    Row("qwen3", 4, {"pp": 4}),
    Row("qwen3", 4, {"cp": 4}),
    Row("qwen3", 4, {"tp": 2, "cp": 2}),
    Row("qwen3", 4, {"tp": 2, "pp": 2}),
    Row("qwen3", 4, {"pp": 2, "vpp": 2, "cp": 2}),
    Row("qwen3", 4, {"pp": 2, "vpp": 2}),
    Row("qwen3_moe", 4, {"ep": 2}),
    Row("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 1}),
    Row("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}),
    Row("qwen3_moe", 4, {"cp": 2, "ep": 2}),
    Row("deepseek_v3", 4, {"tp": 2, "ep": 2, "etp": 1}),
    Row("gpt_oss", 4, {"tp": 2, "ep": 2, "etp": 1}),
    Row("deepseek_v3", 4, {"tp": 2, "pp": 2}),
    *(
        Row(model, 4, sizes)
        for model in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
        for sizes in ({"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "cp": 2}, {"tp": 2})
    ),
    *(
        Row(model, 4, {"tp": 2, **sizes})
        for model in ("qwen3_vl_moe", "qwen3_5_moe", "kimi_vl")
        for sizes in ({"cp": 2}, {"pp": 2}, {"ep": 2, "etp": 1})
    ),
    *(Row(model, 4, {"tp": 2, "pp": 2}, "full recompute", FULL) for model in ("qwen2_5_vl", "qwen3_vl_moe")),
    Row("qwen3", 8, {"tp": 2, "pp": 2}),
    Row("qwen3", 8, {"tp": 2, "pp": 2, "vpp": 2, "cp": 2}),
    Row("qwen3_moe", 8, {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "ep": 2, "etp": 1}),
    *(
        Row(model, 8, {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 1})
        for model in ("deepseek_v3", "qwen3_vl_moe", "qwen3_5_moe")
    ),
]
ROWS += [
    *(Row(f"{model} lora", 2, {"tp": 2}) for model in MODELS),
    *(
        Row(f"{row.model} lora", 2, {"ep": 2})
        for row in ROWS
        if row.sizes == {"ep": 2} and row.name == "EP 2 DP 2" and row.model in MODELS and row.world == 2
    ),
    *(
        Row(f"{model} lora", 2, sizes)
        for model in ("qwen3", "deepseek_v3", "qwen3_5_text")
        for sizes in ({}, {"pp": 2}, {"cp": 2})
    ),
    Row("qwen3 lora", 2, {"tp": 2}, "no sequence parallel", {"sequence_parallel": False}),
    Row("qwen3 lora", 2, note="overlapped", ddp=OVERLAP),
    Row("qwen3 lora", 2, {"tp": 2}, "full recompute", FULL),
    Row("qwen3 lora", 2, {"tp": 2}, "selective recompute", selective("core_attn", "mlp", "layernorm")),
    Row("qwen3 lora", 2, {"pp": 2, "vpp": 2}),
    Row("qwen3 tied lora", 2, {"pp": 2}),
    Row("qwen3_moe lora", 2, {"pp": 2}),
    Row("qwen3_moe lora", 2, {"ep": 2}, "experts recomputed", selective("moe")),
    Row("qwen3_moe lora", 2, {"ep": 2, "etp": 1}, "overlapped", ddp=OVERLAP),
    Row("qwen3 lora of q and v", 2, {"tp": 2}),
    Row("qwen3_moe lora of experts", 2, {"tp": 2}),
    Row("qwen3_moe lora of experts", 2, {"tp": 2, "etp": 2}),
    Row("qwen3_moe lora of experts", 2, {"etp": 2}),
    Row("deepseek_v3 lora of latents", 2, {"tp": 2}),
    *(Row(f"{model} lora", 2, sizes) for model in ("qwen3_vl", "qwen3_5_moe") for sizes in ({"tp": 2}, {"pp": 2})),
    Row("qwen3_vl lora", 2, {"tp": 2}, "full recompute", FULL),
    Row("qwen3 lora", 4, {"tp": 2, "cp": 2}),
    Row("qwen3_moe lora", 4, {"tp": 2, "ep": 2, "etp": 1}),
    Row("qwen3_moe lora", 4, {"tp": 2, "ep": 2, "etp": 2}),
]
