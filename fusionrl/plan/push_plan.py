"""The plan of a weight push: whose source each tensor is, what travels together, and in which order.

Pure: no tensor is touched.

A *source* is the first rank of a group that holds some tensors in parts: the tensor-parallel ranks of a pipeline stage,
for experts the expert-tensor-parallel ranks of one expert-parallel rank, for a stack (one tensor of all experts of a
layer) the expert-parallel ranks. The others of the group send it their parts, bucket by bucket.

Buckets are numbered over all sources, and every rank gathers in this order, and broadcasts take turns in it: two
engines that received from two sources in different orders would wait for each other. While one source sends, the others
gather, and so does the same one for its next bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from fusionrl.base.wording import counted
from fusionrl.models.quantization import SCALE, BlockFp8
from fusionrl.models.rules import Rule, Sizes
from fusionrl.plan.layout import TrainerLayout, stage_layers

if TYPE_CHECKING:
    from fusionrl.config.config import Config
    from fusionrl.models.shape import ModelShape
    from fusionrl.plan.plan import Plan

BUFFERS = 2  # of a source: one bucket is sent while the next one is gathered
_WIDTHS = {"float32": 4, "bfloat16": 2}
_SCALE_WIDTH = 4  # fp32


@dataclass(frozen=True)
class EngineTarget:
    """An engine as the push sees it. `handle` is its actor; the plan itself never looks at it."""

    index: int
    handle: Any
    node_id: str  # `place_over` of several
    bundles: tuple[int, ...]  # devices of its tensor parallel ranks
    num_restarts: int = 0
    ep_size: int = 1  # parts into which its ranks divide the experts (SGLang's --ep-size)
    host: str = ""  # of an engine that others have started; such a one joins a group as SGLang does by itself
    addresses: tuple[str, ...] = ()  # of the nodes of the run's own, which may have joined after the trainers started

    @property
    def tp_size(self) -> int:
        return len(self.bundles)

    @property
    def process(self) -> tuple[int, int, str]:
        """Return what tells its process from others, also from the one before a restart."""
        return self.index, self.num_restarts, self.node_id


def place_over(nodes: Iterable[str]) -> str:
    """Name the place of an engine over these nodes: none of theirs, so no process shares its memory."""
    return "+".join(dict.fromkeys(nodes))


@dataclass(frozen=True)
class PushTensor:
    """One Hugging Face tensor on its way to the engines."""

    name: str
    shape: Sizes
    dtype: str  # torch's name of the precision that it is gathered in
    rule: Rule  # of the Megatron tensor that it is a part of; of a stack `Rule.whole`
    part: int  # its place among the tensors of `rule`
    stage: int  # pipeline rank that holds it
    scales: Sizes | None = None  # of the fp32 scales that go with its values in fp8; None: it is sent as it is gathered

    @cached_property
    def nbytes(self) -> int:
        """Bytes of it as it is gathered."""
        return prod(self.shape) * _WIDTHS[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """Bytes of it as engines get it, scales included."""
        return self.nbytes if self.scales is None else prod(self.shape) + _SCALE_WIDTH * prod(self.scales)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of it in a buffer that has first the one and then the other."""
        return max(self.nbytes, self.sent_bytes)

    @property
    def expert(self) -> int | None:
        return self.rule.expert

    def part_shape(self, rank: int, size: int) -> Sizes:
        """Return the part that tensor-parallel `rank` of `size` has (the vocabulary's padding is not sent)."""
        share = self.rule.share(rank, size, self.name)
        return (*self.shape[: share.dim], share.length, *self.shape[share.dim + 1 :])

    def part_bytes(self, rank: int, size: int) -> int:
        """Bytes that tensor-parallel `rank` sends to rank 0, which is the source and has its own."""
        if rank == 0 or self.rule.split == "replicated":
            return 0
        return prod(self.part_shape(rank, size)) * _WIDTHS[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Tensors that are gathered in one dtype, and sent together."""

    number: int  # in the order of all buckets
    members: tuple[int, ...]  # trainer ranks that hold it in parts; the first one is the source
    tensors: tuple[PushTensor, ...]

    @property
    def source(self) -> int:
        return self.members[0]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of it as it is gathered."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of it as engines get it."""
        return sum(tensor.sent_bytes for tensor in self.tensors)

    @property
    def is_quantised(self) -> bool:
        return any(tensor.scales is not None for tensor in self.tensors)

    def part_bytes(self, rank: int) -> int:
        """Return the bytes that the trainer rank `rank` sends to the source."""
        place = self.members.index(rank)
        return sum(tensor.part_bytes(place, len(self.members)) for tensor in self.tensors)

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes that the source receives from the other members."""
        return sum(self.part_bytes(rank) for rank in self.members[1:])


@dataclass(frozen=True)
class PushPlan:
    """All buckets of a push, in order; each goes to every engine."""

    buckets: tuple[Bucket, ...]
    num_engines: int

    @cached_property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({bucket.source for bucket in self.buckets}))

    @property
    def num_calls(self) -> int:
        """Requests to engines that carry weights."""
        return len(self.buckets) * self.num_engines

    def of_source(self, rank: int) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.source == rank)

    def gathers(self, rank: int) -> tuple[list[Bucket], list[Bucket]]:
        """The buckets that `rank` takes part in gathering, in the order in which it does: those that fit in the buffers
        before anything is sent, and the rest."""
        early = {bucket.number for source in self.sources for bucket in self.of_source(source)[:BUFFERS]}
        mine = [bucket for bucket in self.buckets if rank in bucket.members]
        return [b for b in mine if b.number in early], [b for b in mine if b.number not in early]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that `rank` sends, as its source, of all its buckets."""
        return sum(bucket.sent_bytes for bucket in self.of_source(rank))

    def buffer_bytes(self, rank: int) -> tuple[int, int]:
        """(bytes of each of the source's buffers, bytes of its room for the other members' parts or for its own)."""
        buckets = self.of_source(rank)
        held = [b.part_bytes(rank) for b in self.buckets if rank in b.members[1:]]
        room = max([bucket.gathered_bytes for bucket in buckets] + held, default=0)
        return max((max(bucket.nbytes, bucket.sent_bytes) for bucket in buckets), default=0), room

    def peak_bytes(self, rank: int) -> int:
        """Memory that a push takes on `rank` without the weights, at most; without the fp32 values that
        `convert.quantize` has at a time."""
        flat, room = self.buffer_bytes(rank)
        buckets = self.of_source(rank)
        # A quantised copy coexists with its bucket, and the values of one tensor exist twice, before it replaces them.
        quantised_bytes = [b.sent_bytes + max(t.sent_bytes for t in b.tensors) for b in buckets if b.is_quantised]
        return min(BUFFERS, len(buckets)) * flat + room + max(quantised_bytes, default=0)

    def describe(self) -> tuple[str, str]:
        """Describe the push for `plan.txt`: its size, and who sends."""
        worst = max(self.sources, key=self.peak_bytes)
        sends = ", ".join(f"rank {rank} {self.sent_bytes(rank) / 1e6:.1f} MB" for rank in self.sources[:8])
        more = f" and {len(self.sources) - 8} more" if len(self.sources) > 8 else ""
        largest, extra = max(bucket.sent_bytes for bucket in self.buckets), self.peak_bytes(worst)
        return (
            f"{counted(len(self.buckets), 'bucket')} of at most {largest / 1e6:.1f} MB,"
            f" {counted(self.num_calls, 'call')}; extra memory at most {extra / 1e6:.1f} MB (rank {worst})",
            f"sent by {sends}{more}",
        )


def push_tensors(
    shape: ModelShape, stage_of: Callable[[Rule], int], dtype: str, quantization: BlockFp8 | None = None
) -> list[PushTensor]:
    """Every Hugging Face tensor of the model, once, in the order of export.

    stage_of      rule → pipeline rank that holds its tensor
    dtype         the engines' precision; buffers stay in fp32 (a router's balancing bias decides between experts whose
                  scores are close)
    quantization  which of them engines hold in fp8
    """
    from fusionrl.models.families import model_rules

    def scales(name: str, sizes: Sizes) -> Sizes | None:
        return quantization.scale_shape(sizes) if quantization is not None and name in quantization.names else None

    return [
        PushTensor(
            name, sizes, "float32" if rule.is_fp32 else dtype, rule.whole, part, stage_of(rule), scales(name, sizes)
        )
        for rule in model_rules(shape).values()
        if not (rule.stack and rule.expert)
        for part, (name, sizes) in enumerate(rule.stored.items())
    ]


def stage_of_rule(stages: Sequence[Sequence[int]]) -> Callable[[Rule], int]:
    """`stage_of` of `push_tensors` for layers dealt out as `plan.layout.stage_layers` says."""
    stage_of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}

    def stage_of(rule: Rule) -> int:
        if rule.layer is not None:
            return stage_of_layer[rule.layer]
        return 0 if rule.is_vision or rule.megatron.startswith("embedding.") else len(stages) - 1

    return stage_of


def plan_push(
    tensors: Sequence[PushTensor], layout: TrainerLayout, num_engines: int, max_bytes: int, num_experts: int = 0
) -> PushPlan:
    """Buckets of at most `max_bytes` (one larger tensor, or two of `TOGETHER`, stand alone), each tensor once.

    `tensors` are all of the model's, in the order of export; `num_experts` counts those of one layer.
    """
    streams: dict[tuple[int, ...], list[PushTensor]] = {}
    for tensor in tensors:
        streams.setdefault(_members(layout, tensor, num_experts), []).append(tensor)
    cut: dict[int, list[tuple[tuple[int, ...], list[PushTensor]]]] = {}
    for members, stream in streams.items():
        # A few buffers in another precision would otherwise end a bucket in every layer.
        stream = sorted(stream, key=lambda tensor: tensor.dtype)
        cut.setdefault(members[0], []).extend((members, bucket) for bucket in _cut(stream, max_bytes))
    # Evenly mixed, so that all sources are at work from the beginning to the end.
    mixed = sorted(
        ((i + 0.5) / len(buckets), source, i) for source, buckets in cut.items() for i in range(len(buckets))
    )
    placed = [cut[source][i] for _, source, i in mixed]
    buckets = (Bucket(number, members, tuple(bucket)) for number, (members, bucket) in enumerate(placed))
    return PushPlan(tuple(buckets), num_engines)


def _members(layout: TrainerLayout, tensor: PushTensor, num_experts: int) -> tuple[int, ...]:
    """The ranks that hold the tensor in parts, of the first replica."""
    first, count = tensor.stage * (layout.world_size // layout.pp), layout.tp
    if tensor.rule.stack:
        count = layout.ep
    elif tensor.expert is not None:
        first += layout.etp * (tensor.expert * layout.ep // num_experts)
        count = layout.etp
    return tuple(range(first, first + count))


def own_experts(tensor: PushTensor, target: EngineTarget, rank: int, num_experts: int) -> bool:
    """Return whether the engine's rank keeps the tensor: all but other ranks' experts, if its ranks divide them.

    SGLang gives consecutive experts to each of `ep_size` consecutive runs of ranks.
    """
    if tensor.expert is None or target.ep_size == 1:
        return True
    return tensor.expert * target.ep_size // num_experts == rank * target.ep_size // target.tp_size


@dataclass(frozen=True)
class Feed:
    """One engine of a push by CUDA IPC: which trainer rank serves each of its ranks, and which one speaks to it."""

    engine: int
    senders: tuple[int, ...]  # engine tensor parallel rank → trainer rank whose memory it reads
    leader: int  # trainer rank that collects the payloads and calls the engine


def plan_feeds(targets: Sequence[EngineTarget], trainer_bundles: Sequence[int]) -> list[Feed]:
    """Match senders and engine ranks on GPUs: an engine rank reads the memory of the trainer rank on its own device."""
    feeds = []
    for target in targets:
        missing = [b for b in target.bundles if b not in trainer_bundles]
        if missing:
            raise ValueError(
                f"--update-weight-transport ipc: engine {target.index} has devices {missing} without a trainer;"
                " use broadcast, or --colocate"
            )
        senders = tuple(trainer_bundles.index(b) for b in target.bundles)
        feeds.append(Feed(target.index, senders, senders[0]))
    return feeds


# SGLang joins these two of latent attention, and drops one that comes without the other.
TOGETHER = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")


def _cut(tensors: Iterable[PushTensor], max_bytes: int) -> Iterator[list[PushTensor]]:
    """Consecutive tensors of one dtype, of at most `max_bytes` together in a buffer, those of `TOGETHER` as one."""
    bucket: list[PushTensor] = []
    rest = iter(tensors)
    for tensor in rest:
        unit = [tensor]
        if tensor.name.endswith(TOGETHER[0]) and (following := next(rest, None)) is not None:
            assert are_together(tensor.name, following.name), f"{tensor.name} without its pair"
            unit.append(following)
        size = sum(tensor.buffer_bytes for tensor in bucket + unit)
        if bucket and (size > max_bytes or bucket[0].dtype != unit[0].dtype):
            yield bucket
            bucket = []
        bucket = bucket + unit
    if bucket:
        yield bucket


def are_together(before: str, name: str) -> bool:
    """Return whether tensors of these names, one after the other, must come in one bucket."""
    before, name = before.removesuffix(SCALE), name.removesuffix(SCALE)
    return before == name or (before.endswith(TOGETHER[0]) and name.endswith(TOGETHER[1]))


def planned_push(plan: Plan, config: Config) -> PushPlan | None:
    """The push of a run; None where all ranks send all, or where Megatron deals out the layers in a way of its own."""
    assert plan.layout is not None
    stages = stage_layers(plan.layout, plan.shape.num_layers, config.passthrough.transformer)
    if stages is None or plan.transport == "disk" or (plan.transport == "ipc" and plan.device == "cuda"):
        return None
    limit, dtype = config.weights.update_weight_buffer_size, torch_name(plan.rollout_dtype)
    tensors = push_tensors(plan.pushed_shape, stage_of_rule(stages), dtype, plan.quantization)
    return plan_push(tensors, plan.layout, plan.num_engines, limit, plan.shape.num_experts)


def torch_name(precision: Literal["fp32", "bf16"]) -> str:
    return "float32" if precision == "fp32" else "bfloat16"
