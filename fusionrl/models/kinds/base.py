"""What a kind of layer answers, and the sizes of one rank by which it counts memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from fusionrl.models.rules import Names, Rule, Sizes

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from fusionrl.models.shape import ModelShape


class ParallelSizes(Protocol):
    """The sizes of a layout that a kind reads: `plan.layout.TrainerLayout`."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...


@dataclass(frozen=True)
class RankSizes:
    """What decides how large the tensors are that autograd keeps of a layer on one rank.

    on_cpu: torch's CPU kernels compute attention in fp32, and that of latent attention keeps its probabilities.
    """

    tp: int
    cp: int
    etp: int
    split: int  # ranks over which the hidden states between the parts of a layer are divided
    width: int  # bytes of a value
    is_fused: bool  # Transformer Engine's layers, not the local ones
    on_cpu: bool
    longest: int  # tokens of a micro-batch's longest sequence: what is quadratic in it counts
    modules: frozenset[str] = frozenset()  # names in selective recomputation (--recompute-modules)
    imbalance: float = 1.0  # tokens of the busiest expert-parallel rank, for each where all have the same
    has_rows: bool = False  # our own attention on a CPU: it reads tensors where they are, and keeps no copies
    cells: float = 1.0  # places in the local attention's padded calls for each token
    is_padded: bool = False  # sequences of different lengths: they are copied into the padded calls

    @property
    def kernel_width(self) -> int:
        """Bytes of a value in the attention kernel."""
        return 4 if self.on_cpu else self.width

    def normed(self, size: float, split: float = 1.0) -> float:
        """Bytes a token of a norm over `size` values: its input and each row's scale; torch's on a GPU, in fp32, and
        its normalised copy."""
        return (self.width if self.on_cpu else 8) * size + 4 / split

    def norm_apart(self, hidden: float) -> float:
        """Bytes a token of the norm before a module in attention's place, and of its output; in local layers, where no
        projection has a norm in it, they are counted elsewhere."""
        hidden /= self.split
        return self.normed(hidden, self.split) + hidden * self.width if self.is_fused else 0.0


class Kind(BaseModel):
    """A kind of layer, with its sizes. Two layers of one kind have equal objects."""

    model_config = ConfigDict(frozen=True)

    # By which a saved shape names the class; unique among all kinds.
    kind: str
    # Why tensor parallelism needs sequence parallelism with it; "" where it does not.
    needs_sequence_parallel: ClassVar[str] = ""
    # Modules of which SGLang has adapters, by their Hugging Face names.
    engine_adapters: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Refuse a class whose `kind` is another's: a saved shape would be read as either."""
        place, field = (cls.__module__, cls.__qualname__), cls.model_fields["kind"]
        for other in [] if field.is_required() else Kind.classes():
            if other.model_fields["kind"].default == field.default and (other.__module__, other.__qualname__) != place:
                raise ValueError(
                    f"{cls.__name__}: its kind {field.default!r} is that of {other.__name__}; give it one of its own:"
                    ' kind: Literal["NAME"] = "NAME"'
                )

    @staticmethod
    def classes() -> Iterator[type[Kind]]:
        """Every class of a kind, bases before what is derived from them."""
        waiting: list[type[Kind]] = [Kind]
        while waiting:
            kind = waiting.pop()
            waiting += kind.__subclasses__()
            yield kind

    def fields(self, shape: ModelShape) -> dict[str, object]:
        """Fields of TransformerConfig that a model with this kind of layer has."""
        return {}

    def rules(self, shape: ModelShape, number: int, names: Names) -> Iterator[Rule]:
        """The rules of this part of decoder layer `number`, norms of its input and output not included."""
        raise NotImplementedError

    def divided(self, shape: ModelShape) -> dict[str, int]:
        """Return what tensor parallelism divides: name in messages → how many there are."""
        return {}

    def layout_errors(self, shape: ModelShape, layout: ParallelSizes) -> list[str]:
        """List what this kind cannot do in a layout that `divided` allows, one line each."""
        return []

    def kept_bytes(self, shape: ModelShape, rank: RankSizes) -> float:
        """Bytes that autograd keeps for each token of the rank's packed row, without full recomputation."""
        raise NotImplementedError

    def engine_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Name of an engine's module → the Hugging Face modules that it joins, in their order."""
        return {}

    def engine_rows(self, shape: ModelShape) -> Mapping[str, Sizes]:
        """Hugging Face module whose rows an engine's ranks divide → rows of each section, divided one by one."""
        return {}

    def engine_columns(self) -> tuple[str, ...]:
        """Hugging Face modules whose columns an engine's ranks divide."""
        return ()

    def fit(self, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape) -> None:
        """Put the kind's modules into the submodules of a Megatron layer, where Megatron has others for these fields.

        Not asked of the kinds in the table `FIT` of `trainer/layers.py`.
        """


class Attention(Kind):
    """A kind of attention, or of what replaces it."""

    # Whether siblings' prompts may be computed once: every token sees the same of its own sequence alone.
    may_share_prompts: ClassVar[bool] = True
    may_context_parallel: ClassVar[bool] = True
    # Why engines on a CPU cannot speculate; "" where they can.
    refuses_drafts: ClassVar[str] = ""
    # Scalings of rotary embeddings that trainers and engines compute alike.
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    # Largest difference of a logit to transformers in fp32.
    logit_bound: ClassVar[float] = 1e-5

    @property
    def dense_within(self) -> int | None:
        """Tokens up to which it attends to all that trainers attend to; None: to any length."""
        return None

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None: all before it."""
        return None

    @property
    def fused_since(self) -> tuple[int, int]:
        """Transformer Engine's version, major and minor, whose attention is the first that can do it."""
        return (0, 0)

    def rotary_dim(self, shape: ModelShape) -> int:
        """Values of a head that rotary embeddings turn; 0: none."""
        return 0

    def rotary_base(self, shape: ModelShape) -> float:
        """Base of its rotary embeddings."""
        return shape.rope_theta

    def pair_flops(self, shape: ModelShape) -> float:
        """Operations of forward and backward for each pair of tokens, half of which attend to each other; a `window`
        leaves some out."""
        return 0.0

    def token_flops(self, shape: ModelShape) -> float:
        """Operations of forward and backward for each token, products with weights not included."""
        return 0.0

    def cache_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """Bytes of one token in an engine's cache, on one of `tp` devices."""
        return 0.0

    def state_bytes(self, shape: ModelShape, tp: int, width: int) -> float:
        """Bytes of one request in an engine, whatever its length, on one of `tp` devices."""
        return 0.0


class Mlp(Kind):
    """A kind of MLP."""

    # Routed experts; 0: it has none.
    num_experts: int = 0

    @property
    def has_whole_experts(self) -> bool:
        """Return whether expert tensor parallelism divides none of its experts."""
        return False

    @property
    def expert_rows(self) -> int:
        """Rows of gate and of up of a routed expert, which expert tensor parallelism divides."""
        return 0

    def routed(self, rank: RankSizes) -> float:
        """Tokens that a rank's experts work on, for each token of the packed row."""
        return 0.0

    def widest(self, shape: ModelShape, rank: RankSizes) -> float:
        """Values a token of the widest gradient within it."""
        raise NotImplementedError
