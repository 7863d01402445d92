"""Llama with gated short convolutions in place of attention in some layers: an example of a kind of layer of your own.

The kind is one object. It says what fusionrl asks of a layer: its tensors, what tensor parallelism divides, what it
takes of memory, and which modules Megatron's layer gets. Those are in `_short_conv.py`, which imports torch: this
file is also read by commands that start without it.

The layer is that of LFM2: of three projections b, c and x of the hidden states, the output is c * conv(b * x), where
each channel of the convolution sees its own last tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fusionrl.models.families import parts
from fusionrl.models.kinds import Attention, Full, RankSizes
from fusionrl.models.rules import Family, HfConfig, Names, Rule

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from fusionrl.models.shape import ModelShape


class ShortConv(Attention):
    """A gated convolution over the last `size` tokens, itself included."""

    kind: Literal["short_conv"] = "short_conv"  # names the class in saved shapes
    size: int = Field(gt=0)

    may_share_prompts: ClassVar[bool] = False  # it looks back in the packed row, where a sibling's prompt is not
    may_context_parallel: ClassVar[bool] = False  # the tokens before a rank's first are on another rank

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Checkpoints name each layer's tensors: other layers have others."""
        return {"hetereogenous_dist_checkpoint": True}

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """Rows of b, c and x by heads, so that a tensor-parallel rank has whole heads of each."""
        to, of, h = f"decoder.layers.{number}.self_attention", f"model.layers.{number}.self_attn", shape.hidden_size
        joined, heads = f"{of}.in_proj.weight", shape.num_attention_heads
        parts_of_it = {joined: (h, h, h)}
        yield Rule(f"{to}.in_proj.weight", {joined: (3 * h, h)}, "grouped", "rows", groups=heads, sections=parts_of_it)
        yield Rule(f"{to}.conv_weight", {f"{of}.conv.weight": (h, 1, self.size)}, split="rows")
        yield Rule(f"{to}.out_proj.weight", {f"{of}.out_proj.weight": (h, h)}, split="columns")

    def fit(self, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape) -> None:
        """Put the module in attention's place."""
        from megatron.core.transformer.spec_utils import ModuleSpec

        from fusionrl.trainer.layers import set_norm_apart
        from plugins.models._short_conv import ShortConvolution

        layer.self_attention = ModuleSpec(module=ShortConvolution, params={"kind": self})
        set_norm_apart(layer, transformer)

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Heads, though nothing attends."""
        return {"attention heads": shape.num_attention_heads}

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """b, x, a row for each of the last tokens, c, the convolution, and the input of the last projection."""
        kept = (self.size + 5) * shape.hidden_size / rank.tp * rank.width
        return kept + rank.norm_apart(shape.hidden_size)

    def token_flops(self, shape: ModelShape) -> float:
        """A product and a sum a token that it sees, twice that in backward."""
        return 3.0 * 2 * self.size * shape.hidden_size

    def state_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """The last tokens."""
        return (self.size - 1) * shape.hidden_size * width / tp


def read(raw: HfConfig) -> dict[str, object]:
    """Return the fields of `ModelShape`: `layer_types` says which layers have which kind."""
    parts.refuse(raw, "attention_bias", "mlp_bias")
    kinds: dict[str, Attention] = {"conv": ShortConv(size=raw["conv_size"]), "full_attention": Full()}
    return parts.common(raw) | {"attention": [kinds[name] for name in parts.layer_types(raw, "conv", 2)]}


FAMILY = Family("short_conv", read, parts.layer)
