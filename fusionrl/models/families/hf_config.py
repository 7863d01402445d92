"""The fields of a Hugging Face config.json that families read, under transformers' names and with its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, TypeGuard


class RopeParameters(TypedDict, total=False):
    """Rotary embeddings as transformers 5 writes them; kinds of scaling have more fields."""

    rope_type: str
    rope_theta: float
    partial_rotary_factor: float | None


class HfConfig(TypedDict, total=False):
    """Fields of the families here; a config.json has more, and of these only its own family's."""

    model_type: str
    hidden_act: str
    use_sliding_window: bool | None
    sliding_window: int | None

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool

    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    attention_bias: bool
    mlp_bias: bool
    qkv_bias: bool
    use_qk_norm: bool

    rope_theta: float
    rope_scaling: Mapping[str, object] | None
    rope_parameters: RopeParameters | None
    rope_interleave: bool
    partial_rotary_factor: float | None

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    num_experts: int
    n_routed_experts: int
    num_local_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    n_shared_experts: int | None
    first_k_dense_replace: int
    decoder_sparse_step: int
    mlp_only_layers: list[int] | None
    norm_topk_prob: bool
    topk_method: str
    n_group: int | None
    topk_group: int | None
    routed_scaling_factor: float | None


def is_hf_config(raw: object) -> TypeGuard[HfConfig]:
    """Return whether it is a JSON object. A value of another type is found where `ModelShape` is made of it."""
    return isinstance(raw, dict)
