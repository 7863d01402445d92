"""The tensors of a layer's forward pass that autograd keeps for backward: its norms, and what its kinds say.

Two implementations of a layer are known:

  local               torch operations (`trainer/layers.py`). The inventory was read off
                      `torch.autograd.graph.saved_tensors_hooks` on a CPU; `tools/memory_check.py` measures it anew.
  transformer_engine  fused kernels in bf16. The inventory was compared with published peaks
                      (docs/results/checks.md) and not measured with the versions that are pinned here.

Sizes are in bytes a token of the rank's packed row (T, after context parallelism). The parts of a layer that sequence
parallelism divides over the tensor-parallel ranks are divided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from fusionrl.models.families import model_rules
from fusionrl.models.kinds import Attention, Mlp, RankSizes
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.models.vision import VisionShape
from fusionrl.plan.layout import TrainerLayout, passed
from fusionrl.plan.memory.states import joined_bytes, low_bytes
from fusionrl.plan.trainer_plan import WIDTHS, Impl

LONGEST_ROW = 512
"""Tokens of a sequence up to which our own attention on a CPU (`cpu/row_functions.py`) is the faster one, as
measured. The trainer takes it for micro-batches without a longer one."""


@dataclass(frozen=True)
class Recompute:
    """Megatron's recompute flags."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, transformer: Mapping[str, object]) -> Recompute:
        """Of the passed-through fields of TransformerConfig; its defaults: core_attn of selective recompute."""
        granularity = passed(transformer, "recompute_granularity", str)
        modules = transformer.get("recompute_modules") or ["core_attn"]
        if not isinstance(modules, Sequence):
            raise TypeError(f"recompute_modules is {modules!r}, not a list of names")
        return cls(
            granularity=granularity,
            method=passed(transformer, "recompute_method", str),
            num_layers=passed(transformer, "recompute_num_layers", int),
            modules=frozenset(modules if granularity == "selective" else ()),
        )

    @property
    def is_full(self) -> bool:
        return self.granularity == "full"


@dataclass(frozen=True)
class TrainingOptions:
    """The settings that decide how much memory a training step takes, apart from the states.

    impl       see above
    precision  "fp32" or "bf16"
    on_cpu     torch's CPU kernels: attention in fp32, and that of latent attention keeps its probabilities
    longest    tokens of a micro-batch's longest sequence: what is quadratic in it counts
    sequence_parallel  Megatron's field; it counts where tp > 1
    imbalance  tokens that the busiest expert-parallel rank gets, for each that a rank gets where all get the same
    own_attention  on a CPU: our kernel attends where no sequence is longer than `LONGEST_ROW` (it drops nothing out)
    cells      places in the local attention's padded calls for each token
    is_padded  sequences of different lengths: they are copied into the padded calls
    adapters   that are trained in place of the weights
    tokens     of a micro-batch on one rank: --max-tokens-per-gpu; chunk_size: --log-probs-chunk-size
    num_micro_batches  of an optimizer step, at most
    entropy_grad       the entropy is a part of the loss; whole_logits: a custom loss, with all logits in memory
    max_patches        --max-patches-per-gpu; recomputes_vision: each block of a tower is computed again in backward
    """

    impl: Impl
    precision: str
    on_cpu: bool
    longest: int
    recompute: Recompute = Recompute()
    sequence_parallel: bool = True
    imbalance: float = 1.0
    own_attention: bool = False
    cells: float = 1.0
    is_padded: bool = False
    adapters: AdapterSpec | None = None
    tokens: int = 1
    num_micro_batches: int = 1
    chunk_size: int | None = None
    entropy_grad: bool = False
    whole_logits: bool = False
    max_patches: int | None = None
    recomputes_vision: bool = True

    @property
    def width(self) -> int:
        return WIDTHS[self.precision]

    def rank_sizes(self, layout: TrainerLayout) -> RankSizes:
        """The same for one rank of a layout, as kinds of layers read it."""
        return RankSizes(
            tp=layout.tp,
            cp=layout.cp,
            etp=layout.etp,
            split=layout.tp if self.sequence_parallel else 1,
            width=self.width,
            is_fused=self.impl != "local",
            on_cpu=self.on_cpu,
            longest=self.longest,
            modules=self.recompute.modules,
            imbalance=self.imbalance,
            has_rows=self.own_attention and layout.cp == 1 and self.longest <= LONGEST_ROW,
            cells=self.cells,
            is_padded=self.is_padded,
        )


def kinds_of(shape: ModelShape, layers: Sequence[int]) -> list[tuple[Attention, Mlp]]:
    return [(shape.attention[layer], shape.mlp[layer]) for layer in layers]


def layer_bytes(
    shape: ModelShape, layout: TrainerLayout, options: TrainingOptions, kinds: tuple[Attention, Mlp]
) -> float:
    """Bytes a token that one layer of these kinds keeps, without full recompute."""
    rank, hidden = options.rank_sizes(layout), shape.hidden_size
    kept = sum(kind.kept_bytes(shape, rank) for kind in kinds)
    if options.adapters is not None:
        kept += low_bytes(shape, rank, options.adapters, kinds)
    if rank.is_fused:  # a norm is a part of the linear layer after it
        return kept
    hidden_part = hidden / rank.split
    if shape.input_norms:
        # With the linear layer that reads it; recomputed, it keeps its input.
        plain = rank.normed(hidden_part, rank.split) + hidden_part * rank.width
        kept += 2 * (hidden_part * rank.width if "layernorm" in rank.modules else plain)
    else:
        kept += 2 * hidden_part * rank.width
    if shape.output_norms:
        # Their output only enters the residual sum; the MLP's is a part of it, and recomputed with it.
        kept += (1 if "mlp" in rank.modules else 2) * rank.normed(hidden_part, rank.split)
    return kept


def chunk_bytes(
    shape: ModelShape, layout: TrainerLayout, options: TrainingOptions, layers: Sequence[int]
) -> tuple[float, float]:
    """(bytes a token that a forward pass through `layers` keeps, bytes of what a recomputed piece of it needs at once).

    `layers` are those of one model chunk. With full recompute, `uniform` keeps the input of each run of `num_layers`
    layers, `block` that of each of the first `num_layers`. One piece (of selective recompute: what it leaves out of one
    layer) at a time is computed again in backward.
    """
    kinds, recompute = kinds_of(shape, layers), options.recompute
    of_kinds = {pair: layer_bytes(shape, layout, options, pair) for pair in dict.fromkeys(kinds)}
    sizes = [of_kinds[pair] for pair in kinds]
    if not recompute.is_full:
        plain = replace(options, recompute=Recompute())
        recomputed = (layer_bytes(shape, layout, plain, pair) - size for pair, size in of_kinds.items())
        return sum(sizes), max(recomputed, default=0.0)
    # The hidden states that enter a layer.
    checkpoint = shape.hidden_size * options.width / options.rank_sizes(layout).split
    run = max(recompute.num_layers or 1, 1)
    if recompute.method == "block":
        again = sizes[:run]
        return len(again) * checkpoint + sum(sizes[run:]), max(again, default=0.0)
    pieces = [sizes[start : start + run] for start in range(0, len(sizes), run)]
    return len(pieces) * checkpoint, max((sum(piece) for piece in pieces), default=0.0)


def micro_batch_bytes(
    shape: ModelShape, layout: TrainerLayout, options: TrainingOptions, layers: Sequence[int]
) -> float:
    """Bytes that a forward pass through `layers` keeps whatever its tokens; recomputed pieces keep none."""
    if options.adapters is None or options.recompute.is_full:
        return 0.0
    return joined_bytes(shape, layout, options.adapters, layers, options.rank_sizes(layout))


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


def tower_memory(shape: ModelShape, layout: TrainerLayout, options: TrainingOptions, frozen: Set[str]) -> TowerMemory:
    """Memory of the tower where a micro-batch is full of images; nothing of a model that sees none."""
    vision = shape.vision
    if vision is None:
        return TowerMemory()
    width, split, of_token = options.width, layout.tp if options.sequence_parallel else 1, vision.merge**2
    most = of_token * options.tokens
    patches = min(max(most // split, _LEAST_PATCHES), most, options.max_patches or most)
    rules = [rule for rule in model_rules(shape).values() if rule.is_vision]
    trained = sum(prod(rule.sizes) for rule in rules if rule.megatron not in frozen)
    features = patches / of_token * shape.hidden_size * (1 + len(vision.deepstack)) * width
    pixels = patches * 4 * vision.patch_dim
    block, forward = patches * vision.kept_values * width, pass_bytes(vision, patches, width)
    ends = 5 * vision.hidden_size + 20 + 2.5 * vision.hidden_size * len(vision.deepstack)  # of the mergers above all
    if not trained:
        cache = min(features * options.num_micro_batches, KEPT_FEATURES)
        return TowerMemory(features, cache, forward=forward)
    kept, again = features + patches * width * (ends + vision.patch_dim), block / 2
    if options.recomputes_vision:
        kept, again = kept + patches * width * vision.hidden_size * vision.num_layers, float(block)
    else:
        kept += block * vision.num_layers
    return TowerMemory(kept, 0.0, again + pixels, 4.0 * trained if layout.tp > 1 else 0.0, forward)
