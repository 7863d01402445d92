"""Attention with grouped queries, to all tokens or within a window, and latent attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fusionrl.models.kinds.base import Attention, ParallelSizes, RankSizes
from fusionrl.models.rules import Names, Rule, Sizes, norm

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape


_KNOWN = frozenset(
    ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
    + ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
)


@dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071), as `rope_scaling` in config.json has it.

    Fast dimensions turn as before, slow ones `factor` times more slowly, and a ramp lies between the two. Queries and
    keys get longer by `attention_factor`, so scores grow by its square.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool

    @classmethod
    def of(cls, scaling: Mapping[str, Any], max_positions: int) -> Yarn:
        """Read the numbers; `max_positions` is the model's max_position_embeddings."""
        return cls(
            float(scaling["factor"]),
            int(scaling.get("original_max_position_embeddings") or max_positions),
            float(scaling.get("beta_fast") or 32),
            float(scaling.get("beta_slow") or 1),
            scaling.get("mscale"),
            scaling.get("mscale_all_dim"),
            bool(scaling.get("truncate", True)),
        )

    @property
    def attention_factor(self) -> float:
        """By how much queries and keys get longer: 0.1 ln(factor) + 1, the paper's equation 22, if nothing else is
        said."""
        if self.mscale and self.mscale_all_dim:
            return self._length(self.mscale) / self._length(self.mscale_all_dim)
        return self._length(1.0)

    def _length(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def ramp(self, num_dims: int, base: float) -> tuple[float, float]:
        """Return the pairs of dimensions between which the ramp lies, of `num_dims` rotated dimensions."""

        def pair_of(num_turns: float) -> float:  # which makes so many turns over the original positions
            turns = self.original_positions / (num_turns * 2 * math.pi)
            return num_dims * math.log(turns) / (2 * math.log(base))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, num_dims - 1)


def is_yarn(scaling: Mapping[str, object] | None) -> bool:
    """Return whether a config.json's `rope_scaling` has the type yarn."""
    return bool(scaling) and scaling.get("rope_type", scaling.get("type")) == "yarn"  # type: ignore[union-attr]


def check_yarn(scaling: Mapping[str, object], rotary_percent: float) -> None:
    """Refuse YaRN that transformers, the engines and the trainers would compute in different ways."""
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise ValueError(f"rope_scaling {scaling}: yarn needs a factor of at least 1")
    told = scaling.get("attention_factor")
    is_usual = isinstance(told, float) and math.isclose(told, 0.1 * math.log(factor) + 1.0)  # as OLMo 3 writes it
    if unknown := sorted(scaling.keys() - _KNOWN - ({"attention_factor"} if is_usual else set())):
        raise ValueError(
            f"rope_scaling {scaling}: SGLang and transformers read {', '.join(unknown)} in different ways; leave it out"
        )
    if rotary_percent != 1.0:
        raise ValueError(f"rope_scaling {scaling}: yarn is not supported where only a part of a head is rotated")


class Grouped(Attention):
    """Causal attention with grouped queries; heads, biases and norms of q, k are the shape's.

    rope         whether rotary embeddings turn queries and keys
    rope_theta   base of rotary embeddings of its own, which are not scaled; None: those of the shape
    gated        the output is multiplied by the sigmoid of a gate, whose rows follow those of each query head
    sinks        each head has a score that takes part in its softmax without a value (gpt-oss)
    output_bias  the output projection has a bias
    """

    rope: bool = True
    rope_theta: float | None = Field(default=None, gt=0)
    gated: bool = False
    sinks: bool = False
    output_bias: bool = False
    rope_types: ClassVar[tuple[str, ...]] = ("default", "llama3", "linear")
    engine_adapters: ClassVar[frozenset[str]] = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"})

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Megatron's names of what the layers of this kind have."""
        fields: dict[str, object] = {}
        scales = {kind.scale(shape) for kind in shape.attention if isinstance(kind, Grouped)}
        if len(scales) == 1 and scales != {shape.head_dim**-0.5}:  # of several, each layer has its own
            fields["softmax_scale"] = self.scale(shape)
        if self.gated:
            fields["attention_output_gate"] = True
        if self.sinks:
            fields["softmax_type"] = "learnable"
        if self.output_bias:
            fields["add_bias_linear"] = True
        rotates = [getattr(kind, "rope", True) for kind in shape.attention]
        return fields if all(rotates) else fields | {"no_rope_freq": [int(not rotated) for rotated in rotates]}

    @property
    def fused_since(self) -> tuple[int, int]:
        """Sinks since 2.8, windows since 1.2, as Megatron-core asserts."""
        return (2, 8) if self.sinks else (1, 2) if self.window else (0, 0)

    def scale(self, shape: ModelShape) -> float:
        """Return the factor of scores. With YaRN queries and keys are longer, and scores grow by the square."""
        scale = shape.head_dim**-0.5 if shape.softmax_scale is None else shape.softmax_scale
        if not self.rope or self.rope_theta is not None or not is_yarn(shape.rope_scaling):
            return scale
        assert shape.rope_scaling is not None
        return scale * Yarn.of(shape.rope_scaling, shape.max_position_embeddings).attention_factor ** 2

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """Queries, keys and values by query group; biases and norms of q, k where the shape has them."""
        to, of = f"decoder.layers.{number}.self_attention", f"model.layers.{number}.self_attn"
        h, d, groups = shape.hidden_size, shape.head_dim, shape.num_query_groups
        rows = {"q": shape.num_attention_heads * d * (1 + self.gated), "k": groups * d, "v": groups * d}
        if names.qkv is None:
            hf, sections = {f"{of}.{x}_proj": size for x, size in rows.items()}, {}
        else:
            hf, sections = {f"{of}.{names.qkv}": sum(rows.values())}, {f"{of}.{names.qkv}": tuple(rows.values())}
        for kind, rest in (("weight", (h,)), ("bias", ())) if shape.attention_bias else (("weight", (h,)),):
            tensors = {f"{name}.{kind}": (size, *rest) for name, size in hf.items()}
            parts = {f"{name}.{kind}": sizes for name, sizes in sections.items()}
            yield Rule(f"{to}.linear_qkv.{kind}", tensors, "grouped", "rows", groups=groups, sections=parts)
        if shape.qk_layernorm and shape.width_norm:
            for x in "qk":
                yield Rule(f"{to}.{x}_layernorm.weight", {f"{of}.{x}_norm.weight": (rows[x],)}, split="rows")
        elif shape.qk_layernorm:
            yield norm(f"{to}.q_layernorm", f"{of}.q_norm", d)
            yield norm(f"{to}.k_layernorm", f"{of}.k_norm", d)
        columns = shape.num_attention_heads * d
        yield Rule(f"{to}.linear_proj.weight", {f"{of}.o_proj.weight": (h, columns)}, split="columns")
        if self.output_bias:
            yield Rule(f"{to}.linear_proj.bias", {f"{of}.o_proj.bias": (h,)})
        if self.sinks:
            heads = {f"{of}.sinks": (shape.num_attention_heads,)}
            yield Rule(f"{to}.core_attention.softmax_offset", heads, split="rows")

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Heads, and those of keys and values where they are fewer."""
        counts = {"attention heads": shape.num_attention_heads}
        if shape.num_query_groups != shape.num_attention_heads:
            counts["key-value heads"] = shape.num_query_groups
        return counts

    def layout_errors(self, shape: ModelShape, layout: ParallelSizes) -> list[str]:
        """Context parallelism gathers keys, and knows no sinks."""
        if self.sinks and layout.cp > 1 and self.may_context_parallel:
            return [f"--context-parallel-size {layout.cp}: attention with sinks cannot be divided so; give 1"]
        return []

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Rotary tables, norms of q and k, and the inputs and output of the kernel."""
        d, width = shape.head_dim, rank.width
        n, g = shape.num_attention_heads / rank.tp, shape.num_query_groups / rank.tp
        # Norms over all heads: in fp32, and the normalised copy, by torch in both implementations.
        over_heads = 8 * (n + g) * d + 8 if shape.qk_layernorm and shape.width_norm else 0.0
        if rank.is_fused:
            # The layer's input and its norm, q, k, v and the output; core_attn frees the log-sum-exp alone, as other
            # operations need the rest.
            gate = n * d * (4 + width) if self.gated else 0.0
            return width * (2 * shape.hidden_size / rank.split + (n + 2 * g) * d + n * d) + over_heads + gate
        casts = width == 2 and not rank.on_cpu  # norms in fp32
        # Cosines and sines for q and k; on a CPU all layers have the same (`cpu/row_functions.py`).
        shares_tables = not self.rope or (rank.on_cpu and rank.cp == 1 and not shape.rotary_interleaved)
        saved = 0.0 if shares_tables else 4 * d * shape.rotary_percent * width
        keeps_qkv = False
        if over_heads:
            saved += over_heads
        elif shape.qk_layernorm:
            if casts or not rank.on_cpu:
                saved += (8 if casts else 4) * (n + g) * d  # in fp32, and the normalised copy
            saved += 4 * (n + g)
            if self.gated:
                saved += width * (n + g) * d  # copies of both, out of the rows of queries and gates
            elif not casts:
                keeps_qkv = True  # the norm of k reads it in place
                saved += width * n * d if g > 1 and n > g else 0.0  # that of q a copy
        output = n * d * width
        if self.gated:
            saved += output + n * d * 4  # before the gate, and its sigmoid
        inputs = width * (n * d + g * d)  # q and k as they are rotated or normalised
        if not (self.rope or shape.qk_layernorm):
            inputs = width * n * d if g > 1 and n > g else 0.0  # k in place; q as well, or a copy
        if "core_attn" in rank.modules:
            saved += inputs + output
            keeps_qkv = True  # v, in place
        elif rank.has_rows:
            saved += inputs + output + 4 * n
            keeps_qkv = True  # v, in place
        else:
            saved += _call_bytes(rank, n, n * d, n * d if n > g else g * d, 2 * g * d)
            if n == g and rank.kernel_width == width and rank.cp == 1:
                keeps_qkv = True
                saved -= g * d * rank.kernel_width  # v is read in place
            saved += output if rank.kernel_width != width else 0.0  # next to the kernel's own in fp32
        return saved + ((n * (1 + self.gated) + 2 * g) * d * width if keeps_qkv else 0.0)

    def rotary_dim(self, shape: ModelShape) -> int:
        """A share of each head."""
        return int(shape.head_dim * shape.rotary_percent) if self.rope else 0

    def rotary_base(self, shape: ModelShape) -> float:
        """Its own, or that of the shape."""
        return shape.rope_theta if self.rope_theta is None else self.rope_theta

    def pair_flops(self, shape: ModelShape) -> float:
        """Queries by keys, and scores by values: 2 operations each, twice that in backward, for half of all pairs."""
        return 3.0 * shape.num_attention_heads * 2 * shape.head_dim

    def cache_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """Keys and values."""
        return 2.0 * max(-(-shape.num_query_groups // tp), 1) * shape.head_dim * width

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """SGLang keeps queries, keys and values in one."""
        return {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def engine_rows(self, shape: ModelShape) -> Mapping[str, Sizes]:
        """Sinks, a number for each head."""
        return {"sinks": (shape.num_attention_heads,)} if self.sinks else {}


class Full(Grouped):
    """Attention to all tokens before, and to itself."""

    kind: Literal["full"] = "full"


class Window(Grouped):
    """Attention to the last `size` tokens, itself included, which is how Hugging Face counts them; SGLang's number and
    Megatron's are one less."""

    kind: Literal["window"] = "window"
    size: int = Field(gt=0)

    may_context_parallel: ClassVar[bool] = False

    @property
    def window(self) -> int:
        """Tokens that a token sees."""
        return self.size

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Also which layers have a window. Megatron has one size for all."""
        windows = [kind.window for kind in shape.attention]
        is_narrow = [int(window is not None) for window in windows]
        return super().fields(shape) | {"window_size": (self.size - 1, 0), "window_attn_skip_freq": is_narrow}


def _call_bytes(rank: RankSizes, heads: float, query: float, key: float, padded: float) -> float:
    """Inputs of a call of torch's attention, its output and the log-sum-exp of each query."""
    width = rank.kernel_width
    if rank.cp > 1:
        # The query is in one tensor; keys and values of all ranks, a mask a sequence, and the output joined.
        mask = rank.longest * width
        return width * (query + 2 * key * rank.cp + 2 * query) + 4 * heads + mask + 8 * rank.cp
    once = width * (2 * query + 2 * key) + 4 * heads
    return once * rank.cells + (width * (2 * query + padded) if rank.is_padded else 0.0)


class Latent(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): ranks of the compressed queries (None: not
    compressed) and keys and values.

    index_topk: keys that an indexer chooses (DSA, arXiv:2512.02556), all of them where a text has no more.
    """

    kind: Literal["latent"] = "latent"
    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_head_dim: int = Field(gt=0)
    qk_pos_emb_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    index_topk: int | None = None

    needs_sequence_parallel: ClassVar[str] = "latent attention needs"
    may_share_prompts: ClassVar[bool] = False  # it makes rotary embeddings of its own, by the place in the row
    rope_types: ClassVar[tuple[str, ...]] = ("default", "yarn")
    engine_adapters: ClassVar[frozenset[str]] = frozenset(
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    )

    @property
    def dense_within(self) -> int | None:
        return self.index_topk

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Of MLATransformerConfig, which `multi_latent_attention` asks for."""
        fields: dict[str, object] = self.model_dump(exclude={"kind", "index_topk"}) | {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "rope_type": "rope",
            "rotary_base": shape.rope_theta,
        }
        scaling = shape.rope_scaling
        if scaling is not None and is_yarn(scaling):
            fields |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": scaling["factor"],
                "original_max_position_embeddings": scaling["original_max_position_embeddings"],
                "beta_fast": scaling.get("beta_fast", 32),
                "beta_slow": scaling.get("beta_slow", 1),
                "mscale": scaling.get("mscale", 1.0),
                "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
            }
        return fields

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """The down projections stand whole on every rank."""
        to, of = f"decoder.layers.{number}.self_attention", f"model.layers.{number}.self_attn"
        h, heads = shape.hidden_size, shape.num_attention_heads
        q_rows = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        down = {f"{of}.kv_a_proj_with_mqa.weight": (self.kv_lora_rank + self.qk_pos_emb_head_dim, h)}
        if self.q_lora_rank is None:
            yield Rule(f"{to}.linear_q_proj.weight", {f"{of}.q_proj.weight": (q_rows, h)}, split="rows")
        else:
            # Next to each other, and so in one bucket of a push: SGLang joins the two, and drops one that comes alone.
            yield Rule(f"{to}.linear_q_down_proj.weight", {f"{of}.q_a_proj.weight": (self.q_lora_rank, h)})
        yield Rule(f"{to}.linear_kv_down_proj.weight", down)
        if self.q_lora_rank is not None:
            yield norm(f"{to}.q_layernorm", f"{of}.q_a_layernorm", self.q_lora_rank)
            up = {f"{of}.q_b_proj.weight": (q_rows, self.q_lora_rank)}
            yield Rule(f"{to}.linear_q_up_proj.weight", up, split="rows")
        yield norm(f"{to}.kv_layernorm", f"{of}.kv_a_layernorm", self.kv_lora_rank)
        up = {f"{of}.kv_b_proj.weight": (heads * (self.qk_head_dim + self.v_head_dim), self.kv_lora_rank)}
        yield Rule(f"{to}.linear_kv_up_proj.weight", up, split="rows")
        out = {f"{of}.o_proj.weight": (h, heads * self.v_head_dim)}
        yield Rule(f"{to}.linear_proj.weight", out, split="columns")

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Heads."""
        return {"attention heads": shape.num_attention_heads}

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Compressed and whole queries, keys and values, and what the kernel keeps of them."""
        n, width, split = shape.num_attention_heads / rank.tp, rank.width, rank.split
        query = n * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        value = n * self.v_head_dim
        recomputes_up = "mla_up_proj" in rank.modules
        if rank.is_fused:
            up = 0.0 if recomputes_up else 2 * query + n * (self.qk_head_dim + self.v_head_dim)
            down = 2 * (self.q_lora_rank or 0) + 2 * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
            # The norm before it stands alone: "layernorm" frees its output.
            num_hidden = 1 if "layernorm" in rank.modules else 2
            return width * (num_hidden * shape.hidden_size / split + down / split + up + value)
        # The norm's input is a part of a tensor that holds the positional part as well, unless it is cast.
        in_place = width == 4 or rank.on_cpu
        compressed = rank.normed(self.kv_lora_rank) + (width * self.qk_pos_emb_head_dim if in_place else 0)
        compressed += width * self.kv_lora_rank
        if self.q_lora_rank is not None:
            compressed += rank.normed(self.q_lora_rank) + width * self.q_lora_rank
        num_tables = 1 if recomputes_up else 4
        saved = compressed / split + num_tables * self.qk_pos_emb_head_dim * width + value * width
        inputs = (2 * query + value) * width
        if "core_attn" in rank.modules:
            return saved + (0.0 if recomputes_up else inputs)
        cp, kernel = rank.cp, rank.kernel_width
        if rank.has_rows:
            return saved + (0.0 if recomputes_up else inputs) + 4 * n
        if not rank.on_cpu:
            return saved + (query + cp * (query + value)) * kernel + 4 * n
        # Heads of different sizes: torch's CPU kernel computes and keeps the probabilities.
        # Recomputed up-projections free the value's tensor but not the kernel's copies of query and key.
        held = value if not recomputes_up or cp > 1 or rank.is_padded else 0.0
        sizes = query + cp * (query + held) + n * rank.longest
        copies = inputs if rank.is_padded else 0.0
        return saved + sizes * kernel * rank.cells + copies + (8 * cp if cp > 1 else 0)

    def rotary_dim(self, shape: ModelShape) -> int:
        """The part of keys that all heads share."""
        return self.qk_pos_emb_head_dim

    def pair_flops(self, shape: ModelShape) -> float:
        """As of `Full`; values have a size of their own."""
        return 3.0 * shape.num_attention_heads * (shape.head_dim + self.v_head_dim)

    def cache_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """The compressed keys and values, whole on each device."""
        return float((self.kv_lora_rank + self.qk_pos_emb_head_dim) * width)

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """SGLang joins the two down projections; where queries are not compressed, each stands alone."""
        return {} if self.q_lora_rank is None else {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
