"""Latent attention whose query is not compressed (DeepSeek-V2-Lite), in Transformer Engine's layers.

Such a model has a norm for keys and values alone. Megatron-core 0.19 takes `qk_layernorm` for both, and fuses a norm
that no checkpoint has into the query's projection.
"""

from __future__ import annotations

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class PlainQuery(MLASelfAttention):
    """Latent attention with the query's projection of its spec."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        classes: dict[str, object] = dict(super()._resolve_qk_norm_config(submodules))
        if self.config.q_lora_rank is None:
            classes["linear_q_proj"] = submodules.linear_q_proj
        return classes


def keep_query_plain(spec: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put it into the layers of a decoder with such a query. A Megatron before 0.19 never calls what it replaces."""
    if not config.multi_latent_attention or config.q_lora_rank is not None:
        return
    for layer in spec.layer_specs or []:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = PlainQuery
