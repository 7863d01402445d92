"""Memory of a vision tower on the ranks of the first pipeline stage, without its weights and their states."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from fusionrl.models.families import model_rules
from fusionrl.models.shape import ModelShape
from fusionrl.models.vision import VisionShape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.activations import ActivationOptions

if TYPE_CHECKING:
    from fusionrl.plan.memory.trainer import BatchOptions

KEPT_FEATURES = 2**30
"""Bytes of features of a frozen tower that a rank keeps for the length of a rollout, at most (`trainer/vision.py`)."""
_LEAST_PATCHES = 4096  # of a rank that has a small part of the row: an image that it has a token of is computed whole


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of one rank.

    kept     of a micro-batch, for backward
    cached   features that a frozen tower keeps for the length of a rollout
    again    what backward needs for a moment, once the layers' activations of its micro-batch are gone
    flat     the copy in which gradients are summed over tensor-parallel ranks, once all activations are gone
    forward  what a pass without gradients needs
    """

    kept: float = 0.0
    cached: float = 0.0
    again: float = 0.0
    flat: float = 0.0
    forward: float = 0.0


def pass_bytes(vision: VisionShape, patches: float, width: int) -> float:
    """Bytes that a pass without gradients needs for a moment: pixels in fp32, and one block's values."""
    return patches * (4 * vision.patch_dim + vision.kept_values * width)


def tower_memory(
    shape: ModelShape, layout: TrainerLayout, batch: BatchOptions, options: ActivationOptions, frozen: Set[str]
) -> TowerMemory:
    """Memory of the tower where a micro-batch is full of images; nothing of a model that sees none."""
    vision = shape.vision
    if vision is None:
        return TowerMemory()
    width, split, of_token = options.width, layout.tp if options.sequence_parallel else 1, vision.merge**2
    tokens = batch.tokens
    patches = min(
        max(of_token * tokens // split, _LEAST_PATCHES), of_token * tokens, batch.max_patches or of_token * tokens
    )
    rules = [rule for rule in model_rules(shape).values() if rule.is_vision]
    trained = sum(prod(rule.sizes) for rule in rules if rule.megatron not in frozen)
    features = patches / of_token * shape.hidden_size * (1 + len(vision.deepstack)) * width
    pixels = patches * 4 * vision.patch_dim
    block, forward = patches * vision.kept_values * width, pass_bytes(vision, patches, width)
    ends = 5 * vision.hidden_size + 20 + 2.5 * vision.hidden_size * len(vision.deepstack)  # of the mergers above all
    if not trained:
        cache = min(features * batch.num_micro_batches, KEPT_FEATURES)
        return TowerMemory(features, cache, forward=forward)
    kept, again = features + patches * width * (ends + vision.patch_dim), block / 2
    if batch.recomputes_vision:
        kept, again = kept + patches * width * vision.hidden_size * vision.num_layers, float(block)
    else:
        kept += block * vision.num_layers
    return TowerMemory(kept, 0.0, again + pixels, 4.0 * trained if layout.tp > 1 else 0.0, forward)
