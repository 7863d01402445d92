"""Parameters, gradients and optimizer states of a trainer rank, counted as Megatron-core lays them out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from fusionrl.models.families import model_rules
from fusionrl.models.kinds import Attention, Mlp, RankSizes
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import ADAPTER, IS_A, AdapterSpec, sample_rules
from fusionrl.plan.layout import TrainerLayout, passed
from fusionrl.plan.push_plan import stage_of_rule

_ALIGNMENT = 64  # values to which Megatron aligns each parameter in its buffers
_BUCKET_ALIGNMENT = 128  # values to which it aligns each bucket, as well as the number of data-parallel ranks


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank. `optimizer` is on the device, `host_optimizer` (--optimizer-cpu-offload) is not."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int = 0

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StateOptions:
    """The facts that decide how many bytes a parameter takes.

    weight_bytes     of a parameter in the model: 2 in bf16, 4 in fp32
    gradient_bytes   of a gradient in its buffer
    optimizer_bytes  of a parameter's optimizer state: two moments, and for weights in bf16 a master copy in fp32
    host_share       share of the optimizer that is in host memory
    is_distributed   whether the optimizer's states are divided over the data-parallel ranks
    """

    weight_bytes: int
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    host_share: float = 0.0
    is_distributed: bool = True

    @property
    def of_fp32(self) -> StateOptions:
        """Of parameters that are in fp32 whatever the model is: each is its own master copy."""
        master = 4 if self.weight_bytes == 2 else 0
        return replace(self, weight_bytes=4, gradient_bytes=4, optimizer_bytes=self.optimizer_bytes - master)

    @classmethod
    def of(cls, precision: str, optimizer: Mapping[str, object], ddp: Mapping[str, object]) -> StateOptions:
        """For "fp32" or "bf16" and the passed-through fields for the OptimizerConfig and DDP configuration."""
        is_bf16 = precision == "bf16"
        sizes = [_width(optimizer.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        if is_bf16:
            sizes.append(_width(optimizer.get("main_params_dtype")))
        is_offloaded = bool(optimizer.get("optimizer_cpu_offload"))
        return cls(
            weight_bytes=2 if is_bf16 else 4,
            gradient_bytes=2 if is_bf16 and ddp.get("grad_reduce_in_fp32") is False else 4,
            optimizer_bytes=sum(sizes),
            host_share=(is_offloaded and passed(optimizer, "optimizer_offload_fraction", float)) or 0.0,
            is_distributed=ddp.get("use_distributed_optimizer", True) is not False,
        )


def _width(dtype: object) -> int:
    name = str(dtype).lower()
    return 1 if "8" in name else 2 if "16" in name else 4


@dataclass(frozen=True)
class StageParameters:
    """Parameters of one rank of a pipeline stage, by the groups in which Megatron buffers them."""

    dense: tuple[int, ...]  # numbers of values of its dense parameters
    exact: tuple[int, ...]  # those that are in fp32 also where the model is in bf16
    shared: tuple[int, ...]  # those of an embedding that the first and the last stage share: in a bucket of their own
    expert: tuple[int, ...]  # those of its experts, which are replicated over the expert data-parallel ranks alone
    frozen: tuple[int, ...] = ()  # those that are not trained: in no buffer
    frozen_exact: tuple[int, ...] = ()  # those of `exact` that are not trained

    @property
    def count(self) -> int:
        return sum(map(sum, (self.dense, self.exact, self.shared, self.expert, self.frozen, self.frozen_exact)))


def stage_parameters(
    shape: ModelShape,
    layout: TrainerLayout,
    stages: Sequence[Sequence[int]],
    frozen: Set[str] = frozenset(),
    adapters: AdapterSpec | None = None,
) -> tuple[StageParameters, ...]:
    """Parameters of a rank of each stage; `stages`: layers of each, as `plan.layout.stage_layers` says.

    frozen    Megatron names of those that are not trained
    adapters  that are trained in addition
    """
    stage_of, experts_per_rank = stage_of_rule(stages), shape.num_experts // layout.ep
    groups: list[list[list[int]]] = [[[] for _ in stages] for _ in range(6)]
    dense, exact, shared, expert, still, still_exact = groups
    for rule in model_rules(shape).values():
        if rule.buffer:
            continue
        if rule.expert is not None:
            if rule.expert < experts_per_rank:  # all expert-parallel ranks have as many
                of_stage = still if rule.megatron in frozen else expert
                of_stage[stage_of(rule)].append(part_size(rule, layout.etp))
        elif rule.megatron.startswith("embedding.") and (
            shape.tie_word_embeddings or (shape.mtp_layers and len(stages) > 1)
        ):
            for stage in {0, len(stages) - 1}:  # the output layer of the last stage is a copy of it, or it has one more
                (still if rule.megatron in frozen else shared)[stage].append(part_size(rule, layout.tp))
        else:
            kinds = (still, still_exact) if rule.megatron in frozen else (dense, exact)
            of_stage = kinds[rule.exact]
            of_stage[stage_of(rule)].append(part_size(rule, layout.tp))
    for layer in sample_rules(shape, adapters) if adapters is not None else ():
        for rule in layer:
            if rule.expert is None:
                dense[stage_of(rule)].append(part_size(rule, layout.tp))
            else:
                expert[stage_of(rule)] += [part_size(rule, layout.etp)] * experts_per_rank
    return tuple(StageParameters(*map(tuple, stage)) for stage in zip(*groups, strict=True))


def part_size(rule: Rule, size: int) -> int:
    """Values of a tensor on one of `size` tensor-parallel ranks; the vocabulary is padded to a multiple of them."""
    share = rule.share(0, size)
    return rule.numel // rule.sizes[share.dim] * (share.length + share.num_zeros)


def buffer_size(numels: Sequence[int], num_ranks: int, *, is_distributed: bool = True) -> int:
    """Return the size of Megatron's buffer for parameters of `numels` values, which `num_ranks` ranks replicate."""
    if not numels:
        return 0
    if not is_distributed:
        return sum(numels)
    return _up(sum(_up(numel, _ALIGNMENT) for numel in numels), math.lcm(num_ranks, _BUCKET_ALIGNMENT))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def state_bytes(parameters: StageParameters, layout: TrainerLayout, options: StateOptions) -> Bytes:
    """Bytes of the states of one rank; where the buffers' ends are padded, of the rank that has most."""
    ranks, expert_ranks = layout.dp * layout.cp, layout.expert_dp
    weights, gradients, optimizer = sum(parameters.frozen) * options.weight_bytes, 0, 0
    weights += sum(parameters.frozen_exact) * 4
    dense, exact = parameters.dense, parameters.exact
    if options.weight_bytes == 4:
        dense, exact = dense + exact, ()
    groups = [(dense, ranks, options), (exact, ranks, options.of_fp32), (parameters.shared, ranks, options)]
    for numels, replicas, of in [*groups, (parameters.expert, expert_ranks, options)]:
        size = buffer_size(numels, replicas, is_distributed=options.is_distributed)
        weights += size * of.weight_bytes
        gradients += size * of.gradient_bytes
        optimizer += size // (replicas if options.is_distributed else 1) * of.optimizer_bytes
    on_host = round(optimizer * options.host_share)
    return Bytes(weights, gradients, optimizer - on_host, on_host)


def low_bytes(shape: ModelShape, rank: RankSizes, adapters: AdapterSpec, kinds: tuple[Attention, Mlp]) -> float:
    """Bytes a token that a layer of these kinds keeps of A x; x is kept as that of a trained weight is.

    With dropout, each module keeps what is left of x, and the mask.
    """
    pairs = zip(shape.attention, shape.mlp, strict=True)
    layer = next((layer for layer, pair in enumerate(pairs) if pair == kinds), 0)
    kept, modules = 0.0, set[str]()
    for rule in _kept_rules(shape, adapters, layer, rank.modules):
        if IS_A not in rule.megatron:
            continue
        is_expert, columns = rule.expert is not None, rule.split == "columns"
        routed, size = kinds[1].routed(rank), rank.etp if is_expert else rank.tp
        kept += rule.sizes[0] * rank.width * (routed if is_expert else 1 / rank.split if columns else 1.0)
        if adapters.dropout and (module := rule.megatron.partition(ADAPTER)[0]) not in modules:
            modules.add(module)
            mask = rank.width if rank.on_cpu else 1
            tokens = routed if is_expert else 1.0 if columns else 1 / rank.split
            kept += part_size(rule, size) // rule.sizes[0] * tokens * (rank.width + mask)
    return kept


def joined_bytes(
    shape: ModelShape, layout: TrainerLayout, adapters: AdapterSpec, layers: Iterable[int], rank: RankSizes
) -> float:
    """Bytes of the copies that these layers keep for each micro-batch.

    The adapters of a weight that joins several tensors are joined: one A, and one B with zeros where the rows are
    another's (`trainer/lora.py`).
    """
    values, weights = 0, model_rules(shape)
    for layer in layers:
        modules: dict[str, list[Rule]] = {}
        for rule in _kept_rules(shape, adapters, layer, rank.modules):
            if IS_A in rule.megatron:
                modules.setdefault(rule.megatron.partition(ADAPTER)[0], []).append(rule)
        for module, matrices in modules.items():
            weight = weights[f"{module}.weight"]
            if len(weight.hf) == 1:
                continue
            size = layout.tp if weight.expert is None else layout.etp
            count = 1 if weight.expert is None else shape.num_experts // layout.ep
            joined_a = sum(part_size(rule, size) for rule in matrices) if len(matrices) > 1 else 0
            joined_b = part_size(weight, size) // weight.sizes[1] * adapters.rank * len(matrices)
            values += count * (joined_a + joined_b)
    return float(values * rank.width)


def _kept_rules(shape: ModelShape, adapters: AdapterSpec, layer: int, recomputed: frozenset[str]) -> Iterator[Rule]:
    """Yield the rules of a layer's adapters but for those in an MLP that is computed again in backward."""
    is_again = ("moe" if shape.mlp[layer].num_experts else "mlp") in recomputed
    return (rule for rule in sample_rules(shape, adapters)[layer] if not (is_again and ".mlp." in rule.megatron))


def served_bytes(shape: ModelShape, adapters: AdapterSpec, tp: int, width: int) -> float:
    """Bytes of one adapter on one of an engine's `tp` devices."""
    return float(width * sum(part_size(rule, tp) for layer in sample_rules(shape, adapters) for rule in layer))


BLOCK = 64 * 2**20


def pinned_bytes(size: float) -> int:
    """Bytes of the blocks that hold `size` bytes, which were kept one after the other."""
    return -(-int(size) // BLOCK) * BLOCK
