"""A trainer rank's data for a push: buckets out of the ranks' parts, or, collectively, the whole model.

Each source gathers its own buckets, and only from the ranks that share its tensors. Where the members share a host's
memory, each writes its parts into their places in the source's buffer. Elsewhere the parts of a bucket travel as one
message a rank, in the engines' precision. The collective export of the whole model to every rank is
`hf_io.iter_hf_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.models import convert
from fusionrl.models.convert import quantized
from fusionrl.models.families import Rule, model_rules
from fusionrl.models.hf_io import gather_params, iter_hf_tensors, local_adapters, local_tensors, split_size
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push_plan import Bucket, PushPlan, PushTensor, are_together, push_tensors

if TYPE_CHECKING:
    from fusionrl.weights.adapters import Merger, MergeSums

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Parts = Sequence[tuple[PushTensor, str, Tensor]]
"""(of which tensor, name that engines know it by, view of a bucket's buffer)."""


def of_all_ranks(value: T, world_size: int, group: dist.ProcessGroup | None) -> list[T]:
    """Return the value of each rank; collective."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive (name, tensor) pairs of at most `max_bytes` together; a larger tensor stands alone.

    Two that an engine joins while it loads them (`TOGETHER`), and a weight and its scales, come in one bucket, whatever
    its size. A tensor begins at a multiple of its values' size, as if one followed the other in memory: SGLang takes no
    other. Lazily: at most one bucket of gathered tensors is alive at a time.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        is_full = size + tensor.nbytes > max_bytes and not are_together(bucket[-1][0] if bucket else "", name)
        if bucket and (is_full or size % tensor.element_size()):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def views_of(bucket: Bucket, flat: Tensor) -> Parts:
    """(tensor, its name, view) of a bucket's tensors, one after another in the bytes of `flat`  # uint8."""
    views, offset = [], 0
    for tensor in bucket.tensors:
        views.append((tensor, tensor.name, _view(flat, offset, tensor, tensor.shape)))
        offset += tensor.nbytes
    return views


def quantize_in_place(views: Parts, flat: Tensor, spec: BlockFp8 | None) -> Parts:
    """Quantise each of `views` in its place in `flat`: fp8 values and their scales take no more room.

    The widest values stand first, so that each begins at a multiple of its size, which SGLang asks for.
    """
    converted = []
    for tensor, tensor_name, view in views:
        for name, part in quantized([(tensor_name, view)], spec):
            lies_there = part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            converted.append((tensor, name, part.clone() if lies_there else part))
    placed, offset = [], 0
    for tensor, name, part in sorted(converted, key=lambda item: -item[2].element_size()):
        place = flat[offset : offset + part.nbytes].view(part.dtype).view(part.shape)
        place.copy_(part)
        placed.append((tensor, name, place))
        offset += part.nbytes
    return placed


def _view(flat: Tensor, offset: int, tensor: PushTensor, sizes: Sequence[int]) -> Tensor:
    dtype = DTYPES[tensor.dtype]
    return flat[offset : offset + torch.Size(sizes).numel() * dtype.itemsize].view(dtype).view(sizes)


class PartGatherer:
    """Makes the buckets of a plan, of which this rank is the source or holds a part.

    All ranks of a bucket call `gather` for it, and all in the order of `PushPlan.gathers`.
    """

    def __init__(
        self,
        rank: int,
        plan: PushPlan,
        parts: Mapping[str, tuple[Rule, Tensor]],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        mapped: Mapping[int, Sequence[Tensor]],
        merger: Merger | None = None,
    ) -> None:
        """`parts`: Megatron name → (rule, what this rank holds of it); `groups`: the process groups of this rank over
        which tensors are divided; `mapped`: source → its buffers, where all members have them in their memory;
        `merger`: adds adapters to what is sent. Memory is allocated, and touched, here."""
        self.rank, self.plan, self.own = rank, plan, parts
        self.groups = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        self.mapped = mapped
        self._merger = merger
        # Bucket number → its place among its source's, which alternates between its buffers.
        self._turn = {
            bucket.number: place for source in plan.sources for place, bucket in enumerate(plan.of_source(source))
        }
        by_message = any(b.source not in mapped for b in plan.buckets if rank in b.members and len(b.members) > 1)
        room = plan.buffer_bytes(rank)[1] if by_message else 0
        self._room = torch.zeros(room, dtype=torch.uint8, device=device)
        self._token = torch.zeros(1, dtype=torch.uint8)  # what members tell each other; its value means nothing

    @torch.no_grad()
    def gather(self, bucket: Bucket, flat: Tensor | None) -> None:
        """Bring the bucket's whole tensors into `flat` of its source; the other members send their parts.

        `flat`: uint8, at least `bucket.nbytes`; None on members that are not its source.
        """
        place, size = bucket.members.index(self.rank), len(bucket.members)
        if size > 1 and bucket.source in self.mapped:
            self._fill_together(bucket, flat, place, size)
            return
        if self.rank != bucket.source:
            num_bytes = bucket.part_bytes(self.rank)
            if num_bytes:
                for tensor, view in _parts(bucket, self._room[:num_bytes], place):
                    if view is not None and tensor.rule.stack:
                        self._put_experts(tensor, view, place * view.size(0))
                    elif view is not None:
                        convert.copy_values(view, self._part(tensor, size, view.size(0)))
                dist.send(self._room[:num_bytes], bucket.source, group=self.groups[bucket.members])
            return
        assert flat is not None
        received = self._receive(bucket)
        full_tensors = [view for _, _, view in views_of(bucket, flat)]
        for tensor, full in zip(bucket.tensors, full_tensors, strict=True):
            self._fill(tensor, full, place, size)
        for sender_place, (work, parts) in enumerate(received, start=1):
            work.wait()
            for (tensor, part), full in zip(parts, full_tensors, strict=True):
                if part is not None:
                    convert.fill(tensor.rule, full, part, sender_place, size, tensor.name)

    def _fill_together(self, bucket: Bucket, flat: Tensor | None, place: int, size: int) -> None:
        """Each member writes into the source's buffer, between the source's word that it is free and its own that it is
        done."""
        group = self.groups[bucket.members]
        if flat is None:
            dist.recv(self._token, bucket.source, group=group)
            buffers = self.mapped[bucket.source]
            flat = buffers[self._turn[bucket.number] % len(buffers)]
        else:
            for member in bucket.members[1:]:
                dist.send(self._token, member, group=group)
        for tensor, _, full in views_of(bucket, flat):
            if place == 0 or tensor.rule.split != "replicated":
                self._fill(tensor, full, place, size)
        if place > 0:
            dist.send(self._token, bucket.source, group=group)
            return
        for member in bucket.members[1:]:
            dist.recv(self._token, member, group=group)

    def _receive(self, bucket: Bucket) -> list[tuple[dist.Work, list[tuple[PushTensor, Tensor | None]]]]:
        """The messages of the other members, under way."""
        messages, offset = [], 0
        for place, member in enumerate(bucket.members[1:], start=1):
            num_bytes = bucket.part_bytes(member)
            if num_bytes:
                message = self._room[offset : offset + num_bytes]
                work = dist.irecv(message, member, group=self.groups[bucket.members])
                messages.append((work, list(_parts(bucket, message, place))))
                offset += num_bytes
        return messages

    def _fill(self, tensor: PushTensor, full: Tensor, place: int, size: int) -> None:
        """Copy what this rank, member `place` of `size`, has of a tensor into the whole one."""
        if tensor.rule.stack:
            self._put_experts(tensor, full, 0)
            return
        part = self._part(tensor, size, tensor.part_shape(place, size)[0])
        convert.fill(tensor.rule, full, part, place, size, tensor.name)

    def _put_experts(self, tensor: PushTensor, target: Tensor, first: int) -> None:
        """Copy this rank's experts of a stack, one by one, into `target`, whose first expert is number `first`."""
        for number in range(tensor.rule.stack):
            if (name := tensor.rule.of_expert(number)) in self.own:
                rule, value = self.own[name]
                target[number - first].copy_(convert.take_apart(rule, value.detach())[0])

    def _part(self, tensor: PushTensor, size: int, rows: int) -> Tensor:
        """Return this rank's part of a tensor, without the padding of a vocabulary."""
        rule, value = self.own[tensor.rule.megatron]
        if self._merger is None:
            part = convert.pieces(rule, value.detach(), size)[tensor.part]
        else:
            part = self._merger.piece(rule, value.detach(), tensor.part, size)
        return part[:rows] if rule.split == "rows" and rule.join == "copy" else part


def _parts(bucket: Bucket, message: Tensor, place: int) -> Iterator[tuple[PushTensor, Tensor | None]]:
    """(tensor, what member `place` sends of it in `message`); None where the source has it already."""
    offset, size = 0, len(bucket.members)
    for tensor in bucket.tensors:
        num_bytes = tensor.part_bytes(place, size)
        yield tensor, _view(message, offset, tensor, tensor.part_shape(place, size)) if num_bytes else None
        offset += num_bytes


@dataclass
class Exporter:
    """The weights of rank `rank` of a trainer, in the engines' precision `dtype` ("float32" or "bfloat16").

    `reload` brings them into memory where they were given away; `quantization` says what engines hold in fp8. `merged`:
    the adapters to add to the weights; None: weights are as they are; `merge_sums`: what that loses.
    """

    chunks: Sequence[torch.nn.Module]
    transformer: Any  # Megatron's TransformerConfig
    shape: ModelShape
    layout: TrainerLayout
    rank: int
    dtype: str
    device: torch.device
    reload: Callable[[], None] = lambda: None
    quantization: BlockFp8 | None = None
    merged: AdapterSpec | None = None
    merge_sums: MergeSums | None = None

    def whole(self, without: Set[str] = frozenset()) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every other weight, whole, as engines load it; collective over all ranks."""
        return quantized((named for named in self.full() if named[0] not in without), self.quantization)

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """The same before anything is quantised."""
        self.reload()
        exact = {name for rule in model_rules(self.shape).values() if rule.is_fp32 for name in rule.hf}
        value_of = dtype = None
        if (merger := self._merger()) is not None:
            value_of, dtype = lambda rule, value: merger.part(rule, value, split_size(rule)), merger.dtype
        for name, tensor in iter_hf_tensors(self.chunks, self.transformer, self.shape, value_of, dtype=dtype):
            yield name, tensor.detach().to(torch.float32 if name in exact else DTYPES[self.dtype])

    def _merger(self) -> Merger | None:
        if self.merged is None:
            return None
        from fusionrl.weights.adapters import Merger, MergeSums

        held = {name: (rule, part) for name, rule, part in local_adapters(self.chunks, self.shape, self.merged)}
        return Merger(held, self.merged.scale, DTYPES[self.dtype], self.merge_sums or MergeSums())

    def tensors(self, group: dist.ProcessGroup | None) -> list[PushTensor]:
        """Every tensor of the model with the stage that holds it; collective over `group`, of all ranks."""
        own_names = {name for name, _, _ in local_tensors(self.chunks, self.shape)}
        names = of_all_ranks(own_names, self.layout.world_size, group)
        # An output layer that is tied to the embedding stands on the last stage as well.
        # So does, with layers of multi-token prediction there, the embedding: the first stage's counts.
        held = [(name, rank) for rank, own in enumerate(names) for name in own]
        stages = {name: self.layout.coordinates(rank).pp for name, rank in reversed(held)}
        return push_tensors(self.shape, lambda rule: stages[rule.megatron], self.dtype, self.quantization)

    def refresh(self) -> None:
        """Before the first gather of a push, on all ranks: bring the weights of the last step into memory."""
        self.reload()
        gather_params(self.chunks)

    def gatherer(self, plan: PushPlan, mapped: Mapping[int, Sequence[Tensor]]) -> PartGatherer:
        """Of this rank's part of `plan`; `mapped` as of `PartGatherer`."""
        from megatron.core import parallel_state

        parts = {name: (rule, tensor) for name, rule, tensor in local_tensors(self.chunks, self.shape)}
        groups = [parallel_state.get_tensor_model_parallel_group()]
        if self.shape.num_experts:
            groups.append(parallel_state.get_expert_tensor_parallel_group())
            groups.append(parallel_state.get_expert_model_parallel_group())
        return PartGatherer(self.rank, plan, parts, groups, self.device, mapped, self._merger())
