"""A first estimate of a trainer rank's memory: what stands fixed, and what grows with the tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from fusionrl.config.model_shape import ModelShape
from fusionrl.plan.layout import TrainerLayout


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_trainer_memory(shape: ModelShape, layout: TrainerLayout, precision: str, max_tokens: int) -> TrainerMemory:
    """Weights in the training precision, fp32 gradients, Adam's two fp32 moments (and fp32 master weights for bf16)
    split over the data-parallel ranks, and what the backward pass keeps of each layer.

    The activations are those of a decoder layer without recompute, counted from its tensors: per token about
    `9·hidden + 4·ffn + 3·heads·head_dim + 4·groups·head_dim` values a layer (attention itself keeps no scores).
    """
    share = shape.num_parameters // (layout.tp * layout.pp)
    width = 2 if precision == "bf16" else 4
    master = 4 if precision == "bf16" else 0
    kept = (
        9 * shape.hidden_size
        + 4 * shape.ffn_hidden_size
        + (3 * shape.num_attention_heads + 4 * shape.num_query_groups) * shape.head_dim
    )
    tokens = max_tokens // layout.cp
    return TrainerMemory(
        weights=share * width,
        gradients=share * 4,
        optimizer=share * (8 + master) // (layout.dp * layout.cp),
        activations=tokens * kept * width * shape.num_layers // (layout.tp * layout.pp),
    )
