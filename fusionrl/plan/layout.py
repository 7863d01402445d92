"""The layout of the trainer's ranks over tensor, pipeline, context, expert and data parallelism. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fusionrl.base.wording import dividing
from fusionrl.config.hooks import flag_of

if TYPE_CHECKING:
    from fusionrl.config.config import Config
    from fusionrl.models.shape import ModelShape

T = TypeVar("T")


def passed(fields: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    """Return a field that the user passes through; None where it is not given. A whole number counts as a float."""
    value = fields.get(name)
    if kind is float and isinstance(value, int):
        value = float(value)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


@dataclass(frozen=True)
class RankCoordinates:
    """The place of one rank in the dense layout."""

    tp: int
    cp: int
    dp: int
    pp: int


def sequence_multiple(cp: int, sequence_parallel: int) -> int:
    """Return the number that each sequence's length is padded to a multiple of.

    Context parallelism gives each rank two pieces of a sequence, so that causal attention costs all the same; sequence
    parallelism divides each piece over the tensor-parallel ranks.
    """
    return (2 * cp if cp > 1 else 1) * sequence_parallel


@dataclass(frozen=True)
class TrainerLayout:
    """Parallel sizes of the trainers, in Megatron-core's default order "tp-cp-ep-dp-pp".

    The rank of (tp, cp, dp, pp) is `tp + TP * (cp + CP * (dp + DP * pp))`. Expert layers divide the same
    ranks anew, as (etp, ep, expert dp, pp). Example: 8 ranks with tp 2 and pp 2 have dp 2, and rank 6 is
    (tp 0, cp 0, dp 1, pp 1). `vpp` is the number of model chunks that each pipeline rank holds (interleaved 1F1B).
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        flags = {
            "world_size": "--actor-num-nodes × --actor-num-gpus-per-node",
            "tp": "--tensor-model-parallel-size",
            "pp": "--pipeline-model-parallel-size",
            "cp": "--context-parallel-size",
            "ep": "--expert-model-parallel-size",
            "etp": "--expert-tensor-parallel-size",
            "vpp": "--virtual-pipeline-model-parallel-size",
        }
        for name, flag in flags.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{flag} is {getattr(self, name)}; it must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"{flags['vpp']} {self.vpp} needs {flags['pp']} of at least 2: one stage has nothing to interleave"
            )
        for names in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
            product = math.prod(getattr(self, name) for name in names)
            if self.world_size % product:
                sizes = " × ".join(f"{name} {getattr(self, name)}" for name in names)
                raise ValueError(
                    f"{flags['world_size']} is {self.world_size}, which {sizes} does not divide; change"
                    f" {', '.join(flags[name] for name in names)} or the number of ranks;"
                    f" {dividing(self.world_size, product)}"
                )

    @property
    def dp(self) -> int:
        """Data-parallel size: the number of train shards."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the expert layers."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the place of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of the trainer")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coordinates: RankCoordinates) -> int:
        c = coordinates
        return c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))

    def dp_rank(self, rank: int) -> int:
        return self.coordinates(rank).dp

    def ranks_of_dp(self, dp: int) -> list[int]:
        return [rank for rank in range(self.world_size) if self.coordinates(rank).dp == dp]

    def holders(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what names the parameters of a rank: (tp, pp) of dense layers, (etp, ep, pp) of experts."""
        place = self.coordinates(rank)
        return (place.tp, place.pp), (rank % self.etp, rank // self.etp % self.ep, place.pp)

    def with_parameters_of(self, holders: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
        """List the ranks that share dense layers, or experts, with ranks of these `holders`."""
        ranks = range(self.world_size)
        return [rank for rank in ranks if any(map(tuple.__eq__, self.holders(rank), holders))]

    def smaller(self, num_ranks: int) -> TrainerLayout | None:
        """Return the layout of the largest data-parallel size that `num_ranks` ranks allow and that divides this one.

        So each of its ranks trains as many of the shards that were cut for this layout; None: there is none.
        """
        for dp in range(self.dp - 1, 0, -1):
            count = self.world_size // self.dp * dp
            if self.dp % dp == 0 and count <= num_ranks and count % (self.etp * self.ep * self.pp) == 0:
                return replace(self, world_size=count)
        return None


def model_errors(layout: TrainerLayout, shape: ModelShape, transformer: Mapping[str, object]) -> list[str]:
    """List the sizes of the model that a layout does not divide, with the arithmetic, one line each.

    `transformer`: passed-through fields for the TransformerConfig (uneven first and last stages).
    """
    errors: list[str] = []

    def divide(flag: str, size: int, counts: dict[str, int]) -> None:
        fitting = dividing(math.gcd(*counts.values()), size)
        if len(counts) > 1:
            fitting = f"sizes that divide all that it splits: {fitting.partition(': ')[2]}"
        for name, count in counts.items():
            if size > 1 and count % size:
                remainder = f"{count} = {count // size} x {size} + {count % size}"
                errors.append(f"{flag} {size} does not divide the model's {count} {name}: {remainder}; {fitting}")

    tensor = "--tensor-model-parallel-size"
    expert, expert_tensor = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
    divide(tensor, layout.tp, {name: count for kind in shape.kinds for name, count in kind.divided(shape).items()})
    if shape.num_experts:
        rows = max(mlp.expert_rows for mlp in shape.mlp)
        divide(expert, layout.ep, {"experts": shape.num_experts})
        divide(expert_tensor, layout.etp, {"rows of an expert (moe_intermediate_size)": rows})
    else:
        errors += [
            f"{flag} {size}: a {shape.model_type} model has no experts; leave it out"
            for flag, size in ((expert, layout.ep), (expert_tensor, layout.etp))
            if size > 1
        ]
    needs = [kind.needs_sequence_parallel for kind in shape.kinds if kind.needs_sequence_parallel]
    if layout.tp > 1 and transformer.get("sequence_parallel") is False and needs:
        errors.append(f"{tensor} {layout.tp}: {needs[-1]} sequence parallelism; leave --no-sequence-parallel out")
    for kind in dict.fromkeys(shape.attention):
        if layout.cp > 1 and not kind.may_context_parallel:
            errors.append(
                f"--context-parallel-size {layout.cp}: layers of the kind {kind.kind} cannot be divided so; give 1"
            )
    errors += [error for kind in shape.kinds for error in kind.layout_errors(shape, layout)]
    errors += _stage_errors(layout, shape, transformer)
    return errors


def mtp_errors(config: Config, layout: TrainerLayout, shape: ModelShape) -> list[str]:
    """List what does not go with training layers of multi-token prediction, one line each."""
    if not shape.mtp_layers:
        return []
    model, algorithm = config.model, config.algorithm
    reasons = {
        "--loss-type custom_loss: it is given logits, and these layers need the built-in losses' choice of tokens": (
            config.run.mode == "rl" and algorithm.loss_type == "custom_loss"
        ),
        "--custom-model-provider-path, --custom-spec-path: a user's model is built without these layers": bool(
            model.custom_model_provider_path or model.custom_spec_path
        ),
        "--pipeline-model-parallel-layout: these layers stand on the last stage": (
            config.passthrough.transformer.get("pipeline_model_parallel_layout") is not None
        ),
        "--overlap-grad-reduce on several pipeline stages: the last one's embedding has no gradient to wait for": bool(
            layout.pp > 1 and config.passthrough.ddp.get("overlap_grad_reduce")
        ),
        f"--pipeline-model-parallel-size {layout.pp} with tied embeddings: Megatron-core would hold the output layer"
        " and the embedding on the last stage apart": layout.pp > 1 and shape.tie_word_embeddings,
    }
    return [f"--enable-mtp-training with {reason}; leave one out" for reason, holds in reasons.items() if holds]


def stage_layers(layout: TrainerLayout, num_layers: int, transformer: Mapping[str, object]) -> list[list[int]] | None:
    """Layers of each pipeline rank, all its chunks together; None if a Megatron layout string says which.

    For sizes that divide (see `model_errors`).
    """
    if transformer.get("pipeline_model_parallel_layout") is not None:
        return None
    sizes = [0] * layout.pp
    ends = {0: passed(transformer, "num_layers_in_first_pipeline_stage", int)}
    ends[layout.pp - 1] = passed(transformer, "num_layers_in_last_pipeline_stage", int)
    fixed = {stage: size for stage, size in ends.items() if size is not None}
    for stage in range(layout.pp):
        sizes[stage] = fixed.get(stage, (num_layers - sum(fixed.values())) // max(layout.pp - len(fixed), 1))
    stages: list[list[int]] = [[] for _ in range(layout.pp)]
    first = 0
    for _ in range(layout.vpp):
        for stage in range(layout.pp):
            count = sizes[stage] // layout.vpp
            stages[stage] += range(first, first + count)
            first += count
    return stages


def _stage_errors(layout: TrainerLayout, shape: ModelShape, transformer: Mapping[str, object]) -> list[str]:
    ends = {
        name: size
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (size := passed(transformer, name, int)) is not None
    }
    if layout.pp == 1:
        return [f"{flag_of(name)} needs --pipeline-model-parallel-size of at least 2" for name in ends]
    if transformer.get("pipeline_model_parallel_layout") is not None:
        return []  # Megatron reads and checks it
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if transformer.get(name):
            return [
                f"{flag_of(name)} is not supported; give --num-layers-in-first-pipeline-stage or the last's instead"
            ]
    middle = layout.pp - len(ends)
    rest = shape.num_layers - sum(ends.values())
    terms = "".join(f" - {flag_of(name)} {value}" for name, value in ends.items())
    arithmetic = f"{shape.num_layers} layers{terms} = {rest}"
    pieces = max(middle, 1) * layout.vpp
    stages = f"{middle} further stages" if ends else f"--pipeline-model-parallel-size {layout.pp}"
    chunks = f" x {layout.vpp} virtual stages" if layout.vpp > 1 else ""
    fitting = f" ({dividing(rest, pieces)})" if rest > 0 and middle else ""
    if rest < 0 or (middle == 0 and rest) or (middle and (rest % pieces or not rest)):
        return [
            f"{stages}{chunks}: {arithmetic}, which {pieces if middle else 0} does not divide{fitting}; change the"
            " sizes, or give --num-layers-in-first-pipeline-stage or --num-layers-in-last-pipeline-stage"
        ]
    return [
        f"{flag_of(name)} {value} does not divide into {layout.vpp} virtual stages"
        for name, value in ends.items()
        if value % layout.vpp
    ]
