"""The tensors of a layer's forward pass that autograd keeps for backward, by layer and implementation.

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

from fusionrl.models.shape import ModelShape
from fusionrl.plan.defaults import WIDTHS, Impl
from fusionrl.plan.layout import TrainerLayout, passed

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

    @property
    def width(self) -> int:
        return WIDTHS[self.precision]


def layer_bytes(shape: ModelShape, layout: TrainerLayout, options: ActivationOptions, *, has_experts: bool) -> float:
    """Bytes a token that one layer keeps, without full recompute."""
    layer = _LocalLayer if options.impl == "local" else _FusedLayer
    return layer(shape, layout, options).total(has_experts)


def _split(layout: TrainerLayout, options: ActivationOptions) -> int:
    """Ranks over which the hidden states between the parts of a layer are divided."""
    return layout.tp if options.sequence_parallel else 1


class _Layer:
    """Sizes that both implementations read; `tp` and so on in their usual short names."""

    def __init__(self, shape: ModelShape, layout: TrainerLayout, options: ActivationOptions) -> None:
        self.shape, self.layout, self.options = shape, layout, options
        self.width, self.split = options.width, _split(layout, options)
        self.hidden = shape.hidden_size / self.split
        self.heads = shape.num_attention_heads / layout.tp
        self.groups = shape.num_query_groups / layout.tp
        self.modules = options.recompute.modules

    @property
    def routed(self) -> float:
        """Tokens that this rank's experts work on, for each token of the packed row."""
        moe, layout = self.shape.moe, self.layout
        assert moe is not None
        return moe.topk * layout.etp * self.options.imbalance / self.split


class _LocalLayer(_Layer):
    """`trainer/layers.py`. Norms keep their input and each row's scale; torch's on a GPU, in fp32, and its
    normalised copy."""

    def total(self, has_experts: bool) -> float:
        norms = 2 * self._norm(self.hidden, self.split, drops="layernorm")
        if self.shape.output_norms:
            # Their output only enters the residual sum; the MLP's is a part of it, and recomputed with it.
            norms += (1 if "mlp" in self.modules else 2) * self._normed(self.hidden, self.split)
        return norms + self.attention() + (self.experts() if has_experts else self.mlp())

    def _norm(self, size: float, split: float, drops: str | None = None) -> float:
        """A norm over `size` values a token with the linear layer that reads it; recomputed, it keeps its input."""
        if drops in self.modules:
            return size * self.width
        return self._normed(size, split) + size * self.width

    def _normed(self, size: float, split: float = 1.0) -> float:
        return (self.width if self.options.on_cpu else 8) * size + 4 / split

    def attention(self) -> float:
        return self._latent() if self.shape.mla is not None else self._grouped()

    def _grouped(self) -> float:
        shape, width, options = self.shape, self.width, self.options
        d, n, g = shape.head_dim, self.heads, self.groups
        casts = width == 2 and not options.on_cpu  # norms in fp32
        kernel = 4 if options.on_cpu else width  # bytes of a value in the attention kernel
        # Cosines and sines for q and k; on a CPU all layers have the same (`cpu/rotary.py`).
        shares_tables = options.on_cpu and self.layout.cp == 1 and not shape.rotary_interleaved
        saved = 0.0 if shares_tables else 4 * d * shape.rotary_percent * width
        keeps_qkv = False
        if shape.qk_layernorm:
            if casts or not options.on_cpu:
                saved += (8 if casts else 4) * (n + g) * d  # in fp32, and the normalised copy
            saved += 4 * (n + g)
            if not casts:
                keeps_qkv = True  # the norm of k reads it in place
                saved += width * n * d if g > 1 and n > g else 0.0  # that of q a copy
        output = n * d * width
        if "core_attn" in self.modules:
            saved += width * (n * d + g * d) + output
            keeps_qkv = True  # v, in place
        elif self._has_rows:
            saved += width * (n * d + g * d) + output + 4 * n
            keeps_qkv = True  # v, in place
        else:
            saved += self._kernel(n * d, n * d if n > g else g * d, kernel)
            if n == g and kernel == width and self.layout.cp == 1:
                keeps_qkv = True
                saved -= g * d * kernel  # v is read in place
            saved += output if kernel != width else 0.0  # next to the kernel's own in fp32
        return saved + ((n + 2 * g) * d * width if keeps_qkv else 0.0)

    def _kernel(self, query: float, key: float, width: int) -> float:
        """Attention's inputs, its output and the log-sum-exp of each query."""
        options, cp, n = self.options, self.layout.cp, self.heads
        if cp > 1:
            # The query is in one tensor; keys and values of all ranks, a mask a sequence, and the output joined.
            mask = options.longest * width
            return width * (query + 2 * key * cp + 2 * query) + 4 * n + mask + 8 * cp
        once = width * (2 * query + 2 * key) + 4 * n
        copies = width * (2 * query + 2 * self.groups * self.shape.head_dim) if options.is_padded else 0.0
        return once * options.cells + copies

    def _latent(self) -> float:
        mla, width, options = self.shape.mla, self.width, self.options
        assert mla is not None
        n, split = self.heads, self.split
        query = n * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        value = n * mla.v_head_dim
        # The norm's input is a part of a tensor that holds the positional part as well, unless it is cast.
        in_place = width == 4 or options.on_cpu
        compressed = self._normed(mla.kv_lora_rank) + (width * mla.qk_pos_emb_head_dim if in_place else 0)
        compressed += width * mla.kv_lora_rank
        if mla.q_lora_rank is not None:
            compressed += self._normed(mla.q_lora_rank) + width * mla.q_lora_rank
        num_tables = 1 if "mla_up_proj" in self.modules else 4
        saved = compressed / split + num_tables * mla.qk_pos_emb_head_dim * width + value * width
        inputs = (2 * query + value) * width
        if "core_attn" in self.modules:
            return saved + (0.0 if "mla_up_proj" in self.modules else inputs)
        cp = self.layout.cp
        kernel = 4 if options.on_cpu else width
        if self._has_rows:
            return saved + (0.0 if "mla_up_proj" in self.modules else inputs) + 4 * n
        if not options.on_cpu:
            return saved + (query + cp * (query + value)) * kernel + 4 * n
        # Heads of different sizes: torch's CPU kernel computes and keeps the probabilities.
        # Recomputed up-projections free the value's tensor but not the kernel's copies of query and key.
        held = value if "mla_up_proj" not in self.modules or cp > 1 or options.is_padded else 0.0
        sizes = query + cp * (query + held) + n * options.longest
        copies = inputs if options.is_padded else 0.0
        return saved + sizes * kernel * options.cells + copies + (8 * cp if cp > 1 else 0)

    @property
    def _has_rows(self) -> bool:
        """Our own attention: it reads queries, keys and values where they are, and keeps no copies."""
        return self.options.own_attention and self.layout.cp == 1 and self.options.longest <= LONGEST_ROW

    def mlp(self) -> float:
        # Recomputed, it keeps its input, which the norm before it has counted.
        return 0.0 if "mlp" in self.modules else 3 * self.shape.ffn_hidden_size / self.layout.tp * self.width

    def experts(self) -> float:
        """Return the bytes a token that router, routed and shared experts keep for the backward pass."""
        moe, width = self.shape.moe, self.width
        assert moe is not None
        if "moe" in self.modules:
            return 0.0
        router = moe.topk * 4 * 5 + moe.num_experts * 5
        if moe.score_function == "sigmoid":
            router += moe.num_experts * 4 + 4 * moe.topk + 4
            if moe.num_groups > 1:
                router += moe.num_experts + 8 * moe.group_topk
                router += 8 * moe.num_groups * (moe.topk // moe.group_topk)
        saved = router / self.split
        width_ffn = moe.ffn_hidden_size / self.layout.etp
        saved += self.routed * (width * (self.shape.hidden_size + 6 * width_ffn) + 4)
        if moe.shared_ffn_hidden_size and "shared_experts" not in self.modules:
            saved += 5 * moe.shared_ffn_hidden_size / self.layout.tp * width
            saved += (4 + self.shape.hidden_size * width) / self.split if moe.shared_gate else 0.0
        return saved


class _FusedLayer(_Layer):
    """Transformer Engine: a norm with the linear layer after it keeps its input and its output."""

    def total(self, has_experts: bool) -> float:
        return self.attention() + (self.experts() if has_experts else self.mlp())

    def attention(self) -> float:
        mla, d, n, g = self.shape.mla, self.shape.head_dim, self.heads, self.groups
        split, width = self.split, self.width
        if mla is None:
            # q, k, v and the output; core_attn frees the log-sum-exp alone, as other operations need the rest.
            return width * (2 * self.hidden + (n + 2 * g) * d + n * d)
        up = 2 * n * (mla.qk_head_dim + mla.qk_pos_emb_head_dim) + n * (mla.qk_head_dim + mla.v_head_dim)
        down = 2 * (mla.q_lora_rank or 0) + 2 * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
        up = 0.0 if "mla_up_proj" in self.modules else up
        # Before latent attention the norm stands alone: "layernorm" frees its output.
        num_hidden = 1 if "layernorm" in self.modules else 2
        return width * (num_hidden * self.hidden + down / split + up + n * mla.v_head_dim)

    def mlp(self) -> float:
        if "mlp" in self.modules:
            return self.width * self.hidden
        return self.width * (2 * self.hidden + 3 * self.shape.ffn_hidden_size / self.layout.tp)

    def experts(self) -> float:
        moe, width = self.shape.moe, self.width
        assert moe is not None
        saved = (1 if "layernorm" in self.modules else 2) * self.hidden
        if "moe" in self.modules:
            return width * 2 * self.hidden
        if "shared_experts" not in self.modules:
            saved += 3 * moe.shared_ffn_hidden_size / self.layout.tp
        num_ffn = 2 if "moe_act" in self.modules else 3
        saved += self.routed * (2 * self.shape.hidden_size + num_ffn * moe.ffn_hidden_size / self.layout.etp)
        return width * saved


def chunk_bytes(
    shape: ModelShape, layout: TrainerLayout, options: ActivationOptions, layers: Sequence[int]
) -> tuple[float, float]:
    """(bytes a token that a forward pass through `layers` keeps, bytes of what a recomputed piece of it needs at once).

    `layers` are those of one model chunk. With full recompute, `uniform` keeps the input of each run of `num_layers`
    layers, `block` that of each of the first `num_layers`. One piece (of selective recompute: what it leaves out of one
    layer) at a time is computed again in backward.
    """
    kinds, recompute = [shape.has_experts(layer) for layer in layers], options.recompute
    sizes = [layer_bytes(shape, layout, options, has_experts=kind) for kind in kinds]
    if not recompute.is_full:
        plain = replace(options, recompute=Recompute())
        recomputed = (
            layer_bytes(shape, layout, plain, has_experts=kind) - size for kind, size in zip(kinds, sizes, strict=True)
        )
        return sum(sizes), max(recomputed, default=0.0)
    # The hidden states that enter a layer.
    checkpoint, run = shape.hidden_size * options.width / _split(layout, options), max(recompute.num_layers or 1, 1)
    if recompute.method == "block":
        again = sizes[:run]
        return len(again) * checkpoint + sum(sizes[run:]), max(again, default=0.0)
    pieces = [sizes[start : start + run] for start in range(0, len(sizes), run)]
    return len(pieces) * checkpoint, max((sum(piece) for piece in pieces), default=0.0)
