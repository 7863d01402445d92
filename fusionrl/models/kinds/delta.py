"""Gated delta nets: linear attention, with a state for each head of values in place of each token's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from fusionrl.base.wording import dividing
from fusionrl.models.kinds.base import Attention, ParallelSizes, RankSizes
from fusionrl.models.rules import Names, Rule, Sizes, norm

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

CHUNK = 64
"""Tokens whose updates of the state are one triangular system."""


class Delta(Attention):
    """A gated delta net (arXiv:2412.06464) after a short causal convolution, with a gated norm of its output.

    Tensor and context parallelism divide the heads of keys; each has `value_heads / key_heads` heads of values. The
    convolution sees `conv_size` tokens.
    """

    kind: Literal["delta"] = "delta"
    key_heads: int = Field(gt=0)
    value_heads: int = Field(gt=0)
    key_dim: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    conv_size: int = Field(gt=0)

    needs_sequence_parallel: ClassVar[str] = "gated delta nets need"
    may_share_prompts: ClassVar[bool] = False  # a state belongs to one sequence: every sample brings its whole prompt
    refuses_drafts: ClassVar[str] = "delta nets would need a state for each token of a draft"
    logit_bound: ClassVar[float] = 3e-5  # the chunked rule is off by 3e-7 a layer, here and in transformers

    @model_validator(mode="after")
    def _check_heads(self) -> Delta:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads of delta nets, not a multiple of {self.key_heads} key heads"
            )
        return self

    @property
    def ratio(self) -> int:
        """Heads of values for each head of keys."""
        return self.value_heads // self.key_heads

    @property
    def width(self) -> int:
        """Rows of the joined projection: q, k, v, z, and the two numbers of each head of values."""
        return 2 * self.key_heads * self.key_dim + 2 * self.value_heads * (self.value_dim + 1)

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Checkpoints name each layer's tensors: other layers have others."""
        return {"hetereogenous_dist_checkpoint": True}

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """Rows by heads of keys, so that a tensor-parallel rank holds whole heads."""
        to, of = f"decoder.layers.{number}.self_attention", f"model.layers.{number}.linear_attn"
        h, groups = shape.hidden_size, self.key_heads
        keys, values, heads = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.value_heads
        if names.joins_delta:
            rows, sections = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}, {}
        else:
            rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
            sections = {f"{of}.in_proj_qkv.weight": (keys, keys, values)}
        projections = {f"{of}.in_proj_{part}.weight": (size, h) for part, size in rows.items()}
        yield Rule(f"{to}.in_proj.weight", projections, "grouped", "rows", groups=groups, sections=sections)
        conv = f"{of}.conv1d.weight"
        of_conv: dict[str, Sizes] = {conv: (keys, keys, values)}
        sizes = {conv: (self.channels, 1, self.conv_size)}
        yield Rule(f"{to}.conv_weight", sizes, "grouped", "rows", groups=groups, sections=of_conv)
        yield Rule(f"{to}.dt_bias", {f"{of}.dt_bias": (heads,)}, split="rows")
        # A logarithm of the rate of decay: what rounding takes from it counts for every token that the state remembers.
        yield Rule(f"{to}.A_log", {f"{of}.A_log": (heads,)}, split="rows", exact=True)
        yield norm(f"{to}.out_norm", f"{of}.norm", self.value_dim)
        yield Rule(f"{to}.out_proj.weight", {f"{of}.out_proj.weight": (h, values)}, split="columns")

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Heads of keys."""
        return {"key heads of delta nets": self.key_heads}

    def layout_errors(self, shape: ModelShape, layout: ParallelSizes) -> list[str]:
        """Context parallelism divides the heads that a tensor-parallel rank has."""
        if self.key_heads % layout.tp or self.key_heads // layout.tp % layout.cp == 0:  # the former, `divided` says
            return []
        return [
            f"--context-parallel-size {layout.cp}: with --tensor-model-parallel-size {layout.tp} it does not divide"
            f" the model's {self.key_heads} key heads of delta nets; {dividing(self.key_heads // layout.tp, layout.cp)}"
        ]

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Count what convolution, norms of q and k, the rule in chunks, output norm and its gate keep, in fp32.

        Context parallelism divides heads, and each rank has all tokens. FLA's kernels keep less of the rule.
        """
        size = min(CHUNK, 1 << max(rank.longest - 1, 0).bit_length())
        padded = -(-rank.longest // size) * size / rank.longest
        heads, channels = self.value_heads / rank.tp, self.channels / rank.tp
        keys, values = heads * self.key_dim, heads * self.value_dim
        # The row, what SiLU reads, and what it gives.
        convolved = 3 * channels + 2 * self.key_heads / rank.tp + 3 * heads
        # What is copied into chunks, and there:
        rows = 2 * keys + values + heads
        # Keys, queries and values in chunks, those that the products read, what is solved, and a state for each chunk.
        states = heads * self.key_dim * self.value_dim / size
        of_chunks = 10 * keys + 3 * values + heads * (5 * size + 3) + states
        gated = 4 * (values + heads) + rank.width * 3 * values + (rank.width if rank.on_cpu else 8) * values
        saved = 4 * (convolved + rows + of_chunks * padded) + gated + (16 * rank.cp if rank.cp > 1 else 0)
        return saved + rank.norm_apart(shape.hidden_size)

    def token_flops(self, shape: ModelShape) -> float:
        """Products of the chunked rule and the state, 2 operations each, twice that in backward; a triangular system
        costs half of a product."""
        inside = CHUNK * (2.5 * self.key_dim + 1.5 * self.value_dim)
        return 3.0 * 2 * self.value_heads * (inside + 3 * self.key_dim * self.value_dim)

    def state_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """The state of the rule in fp32, and the last tokens before the convolution."""
        state = 4.0 * self.value_heads * self.key_dim * self.value_dim
        return (state + (self.conv_size - 1) * self.channels * width) / tp

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """SGLang keeps the projections in two."""
        return {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}

    def engine_rows(self, shape: ModelShape) -> Mapping[str, Sizes]:
        """q, k and v are split one by one."""
        keys, values, heads = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.value_heads
        whole = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads, "A_log": heads, "dt_bias": heads}
        joined = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        parts = dict.fromkeys(("in_proj_qkv", "conv1d"), (keys, keys, values))
        return parts | {name: (rows,) for name, rows in (whole | joined).items()}

    def engine_columns(self) -> tuple[str, ...]:
        """The output projection."""
        return ("out_proj",)
