"""Latent attention without a compressed query, in a spec of layers as Transformer Engine's are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.cpu import megatron_patches


def test_only_megatron_s_own_attention_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Megatron may put one of its own there, which computes what ours would not."""
    megatron_patches.install()
    from fusionrl.trainer import layers

    other = type("FusedAttention", (layers.MLASelfAttention,), {})
    attentions = [SimpleNamespace(module=module) for module in (layers.MLASelfAttention, other)]
    specs = [SimpleNamespace(submodules=SimpleNamespace(self_attention=attention)) for attention in attentions]
    monkeypatch.setattr(
        layers, "get_gpt_decoder_block_spec", lambda *args, **kwargs: SimpleNamespace(layer_specs=specs)
    )
    transformer: Any = SimpleNamespace(transformer_impl="transformer_engine")
    shape: Any = SimpleNamespace(mla=SimpleNamespace(q_lora_rank=None), output_norms=False)
    layers.block_spec(transformer, shape, None)
    assert [attention.module for attention in attentions] == [layers.PlainQuery, other]
