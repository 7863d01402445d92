"""Rotary embeddings of the trainers whose frequencies a model's config.json changes: Llama 3's scaling, and YaRN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusionrl.models.shape import ModelShape
from fusionrl.models.yarn import Yarn, is_yarn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def scale_rope(model: GPTModel, shape: ModelShape) -> None:
    """Change the frequencies of a model that has no latent attention, whose own embedding does it."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return
    rope = model.rotary_pos_emb
    if is_yarn(scaling):
        yarn = Yarn.of(scaling, shape.max_position_embeddings)
        rope.inv_freq = yarn_frequencies(yarn, shape.head_dim, shape.rope_theta).to(rope.inv_freq.device)
        return
    # GPTModel's own option fixes three of Llama 3's four numbers; its RotaryEmbedding takes them all.
    rope.inv_freq = rope._apply_scaling(
        rope.inv_freq,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
    )


def yarn_frequencies(yarn: Yarn, num_dims: int, base: float) -> Tensor:
    """Return the angle by which each pair of dimensions turns from a position to the next, fp32 [num_dims / 2]."""
    powers = base ** (torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)
    low, high = yarn.ramp(num_dims, base)
    ramp = (torch.arange(num_dims // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    slowed = ramp.clamp(0, 1)
    return (1.0 / (yarn.factor * powers)) * slowed + (1.0 / powers) * (1 - slowed)
