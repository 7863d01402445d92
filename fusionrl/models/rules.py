"""The rules that a family's table is made of, one for each Megatron tensor. Pure, without torch.

Loading joins tensors by them and splits the result; exporting gathers and takes apart (`models/convert.py`). Megatron's
names are those of the local layer spec with the numbers of layers and experts in the whole model; Transformer Engine's
fused names are mapped onto them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape
    from fusionrl.models.vision import VisionShape

# A parsed config.json, under transformers' names. A value of a wrong type is found where `ModelShape` is made of what a
# family read.
HfConfig = Mapping[str, Any]
Join = Literal["copy", "grouped", "concat", "interleaved"]
_JOINS = get_args(Join)
Split = Literal["replicated", "rows", "columns", "paired_rows"]
Sizes = tuple[int, ...]


class Share(NamedTuple):
    """The part of a tensor that a tensor-parallel rank holds: `slices` of its dimension `dim`, then zeros."""

    dim: int
    slices: list[slice]
    num_zeros: int = 0

    @property
    def length(self) -> int:
        """Size of the dimension without the zeros."""
        return sum(part.stop - part.start for part in self.slices)


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor.

    megatron  its name
    hf        Hugging Face name → shape, in the order of joining
    join      copy     one tensor, as it is
              grouped  rows interleaved by `groups` of heads: (q of group 0, k 0, v 0, q of group 1, …)
              concat   one over the other: gate over up
              interleaved  rows of gate and of up alternate in one tensor (gpt-oss); in Megatron's, gate over up
    split     over tensor-parallel ranks: replicated; rows; columns; paired_rows (rows of each half of the tensor)
    expert    number of its expert: it stands on one expert-parallel rank, split over expert-tensor-parallel ranks
    buffer    a buffer, which no gradient trains; in fp32
    exact     in fp32 here, in pushes and in engines, where the model is in bf16
    optional  a folder need not have it; then it is zeros
    groups    of a grouped join: whole groups stand on a tensor-parallel rank
    sections  of a grouped join: Hugging Face name → rows of each part of a tensor of several (q, k, v in one)
    transposed  the Hugging Face tensor is [in, out], Megatron's [out, in]
    stack     experts of a layer, where one Hugging Face tensor has those of all (gpt-oss); `hf` has the shape of one,
              which stands whole on its rank; 0: a tensor of its own
    """

    megatron: str
    hf: Mapping[str, Sizes]
    join: Join = "copy"
    split: Split = "replicated"
    expert: int | None = None
    buffer: bool = False
    exact: bool = False
    optional: bool = False
    groups: int = 0
    sections: Mapping[str, Sizes] = field(default_factory=dict)
    transposed: bool = False
    stack: int = 0

    def __post_init__(self) -> None:
        if self.join not in _JOINS:
            cure = "; write grouped, with groups=shape.num_query_groups" if self.join == "qkv" else ""
            raise ValueError(f"{self.megatron}: join {self.join!r} is none of {', '.join(_JOINS)}{cure}")
        if (self.join == "grouped") != (self.groups > 0):
            raise ValueError(f"{self.megatron}: join {self.join!r} with groups {self.groups}; grouped alone has groups")

    @property
    def is_fp32(self) -> bool:
        """Return whether it is in fp32 also where the model is in bf16."""
        return self.buffer or self.exact

    @cached_property
    def numel(self) -> int:
        """Number of its values."""
        return prod(self.sizes)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the whole Megatron tensor."""
        first, *_ = self.hf.values()
        return first[::-1] if self.transposed else (sum(sizes[0] for sizes in self.hf.values()), *first[1:])

    @cached_property
    def layer(self) -> int | None:
        """Number of the decoder layer that it belongs to; None: a tower, the embedding, what comes after the layers."""
        match = _LAYER.match(self.megatron)
        return None if match is None else int(match[1])

    @cached_property
    def stored(self) -> Mapping[str, Sizes]:
        """Hugging Face name → shape as checkpoints have it, those of a stack with all experts."""
        return {name: (self.stack, *sizes) for name, sizes in self.hf.items()} if self.stack else self.hf

    @cached_property
    def whole(self) -> Rule:
        """Itself; of the first expert of a stack, the rule of all experts' tensor, whose rows are the experts."""
        if not self.stack:
            return self
        return replace(self, hf=self.stored, join="copy", split="rows", expert=None, transposed=False)

    def of_expert(self, number: int) -> str:
        """Name of the same Megatron tensor of expert `number`."""
        return _EXPERT.sub(f".local_experts.{number}.", self.megatron)

    @property
    def is_vision(self) -> bool:
        """Return whether it belongs to a vision tower."""
        return self.megatron.startswith(VISION)

    def section_rows(self, name: str) -> Sizes:
        """Rows of each part of the Hugging Face tensor `name`."""
        return self.sections.get(name, self.hf[name][:1])

    def share(self, rank: int, size: int, name: str | None = None) -> Share:
        """Return what tensor-parallel `rank` of `size` holds of the Megatron tensor, or of the tensor `name` of `hf`.

        Zeros pad the rows where `size` does not divide them (the vocabulary).
        """
        sizes = self.sizes if name is None else self.hf[name]
        if self.split == "replicated" or size == 1:
            return Share(0, [slice(0, sizes[0])])
        if self.split == "columns":
            width = sizes[1] // size
            return Share(1, [slice(rank * width, (rank + 1) * width)])
        blocks = sizes[:1] if name is None else self.section_rows(name)
        if self.split == "paired_rows" and (name is None or self.join == "copy"):
            blocks = (sizes[0] // 2,) * 2  # gate over up in one tensor: a rank holds rows of both
        slices, first, num_zeros = [], 0, 0
        for rows in blocks:
            width = -(-rows // size)
            start, stop = min(rank * width, rows), min((rank + 1) * width, rows)
            slices.append(slice(first + start, first + stop))
            first, num_zeros = first + rows, width - (stop - start)
        return Share(0, slices, num_zeros)


def norm(megatron: str, hf: str, size: int) -> Rule:
    """The weight of one RMSNorm."""
    return Rule(f"{megatron}.weight", {f"{hf}.weight": (size,)})


@dataclass(frozen=True)
class Names:
    """Hugging Face's names in a family's layers, where they are not Llama's.

    experts  the module of a mixture
    router   the router in it
    score_bias  the bias in it that balances the choice of experts
    stacks   the same tensor of all experts of a layer is one (gpt-oss)
    expert   gate, up and down projection of an expert
    shared   the shared expert of a mixture
    gate_up  gate and up of the dense MLP, where checkpoints have them in one tensor
    qkv      queries, keys and values, where checkpoints have them in one tensor
    joins_delta  the projections of delta nets are two tensors, by heads of keys (Qwen3-Next), not four
    norms    before attention, after it, before the MLP, after it; of those that the shape has
    """

    experts: str = "mlp"
    router: str = "gate"
    score_bias: str = "gate.e_score_correction_bias"
    stacks: bool = False
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    gate_up: str | None = None
    qkv: str | None = None
    joins_delta: bool = False
    norms: tuple[str, str, str, str] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


LLAMA = Names()


@dataclass(frozen=True)
class MtpNames:
    """Hugging Face's names of layers of multi-token prediction. `{layer}` is num_layers + `{number}`, from 0 on.

    layer  prefix of what a decoder layer has
    ends   norm of what comes first in the projection of both, of what comes second, the projection, norm of the output
    most   layers that these names can tell apart
    hidden_first  the projection reads hidden states and then embeddings, not the reverse
    """

    layer: str
    ends: tuple[str, str, str, str]
    most: int = 1
    hidden_first: bool = False


@dataclass(frozen=True)
class Published:
    """The form of the folders of a multimodal model that has a family as its text part (`models/hf_folder.py`).

    model_type       of its config.json, whose `text_config` is the family's
    others           pattern of names in its files that do not belong to the text model
    architecture     SGLang's class of the text part alone; None: engines serve the whole model in any run
    prefixes         beginnings of names in its files → those of the text model, and of a tower
    packed           name of a tensor of all experts → the tensors of one expert in it, one over the other
    may_turn         such a tensor may have [in, out] of each expert, not [out, in]
    vision           reads the tower from both config.json, the whole and its text part; None: it is not trained here
    boxes_in_pixels  the model gives boxes in an image in pixels, not in thousandths of its sides
    """

    model_type: str
    others: str
    architecture: str | None = None
    prefixes: Mapping[str, str] = field(
        default_factory=lambda: {"model.language_model.": "model.", "model.visual.": "visual."}
    )
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    may_turn: bool = False
    vision: Callable[[HfConfig, HfConfig], VisionShape] | None = None
    boxes_in_pixels: bool = False

    @property
    def is_nested(self) -> bool:
        """Return whether the text model is a module of the whole; engines that see then have the files' names."""
        return "" in self.prefixes.values()


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    read           fields of `ModelShape` from config.json; raises `ValueError` for what no trainer here computes, and
                   `KeyError` for a size that is missing
    layer          rules of one decoder layer
    ignored        pattern of names that its checkpoints carry and no model here needs, added to `IGNORED`;
                   {num_layers} is the number of layers, {further} the numbers that layers after the last may have
    engines_join   engines join some tensors (`Kind.engine_tensors`); False where they run transformers' own model
    engine_paths   parts of names that engines leave out: attention is the layer itself (Qwen3.5)
    engine_whole   modules that each rank of an engine has whole, without rows that pad them (Gemma's embedding)
    engine_copies  engines keep 1 + weight of norms that multiply by it, next to the weight
    engine         fields that SGLang reads in config.json, for folders that lack them
    engine_rows    modules, apart from those of Llama's names, whose rows an engine's ranks divide
    engine_fp32    ends of names of tensors that engines hold in fp32 whatever the model's type
    yarn           trainers and engines compute YaRN alike for it
    mtp            names of its layers of multi-token prediction; None: they are not trained here
    unserved       why engines serve no model of such a shape; None: they serve all
    published      the multimodal model whose text part it is
    defaults       field of config.json → what transformers takes where it is missing, if not what Llama's class takes
    """

    model_type: str
    read: Callable[[HfConfig], dict[str, object]]
    layer: Callable[[ModelShape, int], Iterator[Rule]]
    ignored: str | None = None
    engines_join: bool = True
    engine_paths: tuple[str, ...] = ()
    engine_whole: tuple[str, ...] = ()
    engine_copies: bool = True
    engine: Callable[[HfConfig], dict[str, object]] | None = None
    engine_rows: tuple[str, ...] = ()
    engine_fp32: tuple[str, ...] = ()
    yarn: bool = False
    mtp: MtpNames | None = None
    unserved: Callable[[ModelShape], str | None] | None = None
    published: Published | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)

    def filled(self, raw: HfConfig) -> HfConfig:
        """config.json with the fields that it lacks and `defaults` has."""
        return {**self.defaults, **raw}


# Tensors that some checkpoints carry and no model needs: a tied output layer, and buffers of older versions.
IGNORED = r"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias"

_OTHER_NAMES = (
    (r"^mtp\.layers\.(\d+)\.mtp_model_layer\.", r"mtp.layers.\1.transformer_layer."),  # Megatron-core 0.19's
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"self_attention\.linear_q_up_proj\.layer_norm_weight$", "self_attention.q_layernorm.weight"),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_weight$", "self_attention.kv_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.linear_\1.\2"),
    (r"mlp\.experts\.linear_(fc[12])\.adapter\.(\d+)\.", r"mlp.experts.local_experts.\2.linear_\1.adapter."),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
MTP = "mtp.layers."
VISION = "vision_model."


def canonical_name(name: str, first_layer: int = 0, first_expert: int = 0) -> str:
    """The local spec's name of a Megatron tensor, whichever spec `name` is of, as the whole model numbers it.

    `name` is as the module of a rank has it, whose first layer and first expert have these numbers in the whole model.
    """
    for pattern, plain in _OTHER_NAMES:
        name = re.sub(pattern, plain, name)
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first_expert}.", name)
