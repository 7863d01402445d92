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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusionrl.models.kinds import Attention, Mlp, RankSizes
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.plan.defaults import WIDTHS, Impl
from fusionrl.plan.layout import TrainerLayout, passed
from fusionrl.plan.memory.adapters import joined_bytes, low_bytes

LONGEST_ROW = 512
"""Tokens of a sequence up to which our own attention on a CPU (`cpu/row_attention.py`) is the faster one, as
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
class ActivationOptions:
    """The sizes that decide how large a layer's kept tensors are.

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
    """The kinds of these layers."""
    return [(shape.attention[layer], shape.mlp[layer]) for layer in layers]


def layer_bytes(
    shape: ModelShape, layout: TrainerLayout, options: ActivationOptions, kinds: tuple[Attention, Mlp]
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
    shape: ModelShape, layout: TrainerLayout, options: ActivationOptions, layers: Sequence[int]
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
    shape: ModelShape, layout: TrainerLayout, options: ActivationOptions, layers: Sequence[int]
) -> float:
    """Bytes that a forward pass through `layers` keeps whatever its tokens; recomputed pieces keep none."""
    if options.adapters is None or options.recompute.is_full:
        return 0.0
    return joined_bytes(shape, layout, options.adapters, layers, options.rank_sizes(layout))
