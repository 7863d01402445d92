"""A trainer rank's data for a push: its own parts, or, together with the other ranks, the whole model."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.models.adapters import AdapterSpec
from fusionrl.models.families import model_rules
from fusionrl.models.fp8 import quantized
from fusionrl.models.hf_io import gather_params, iter_hf_tensors, local_adapters, local_tensors, split_size
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push import PushPlan, PushTensor, push_tensors
from fusionrl.weights.gather import DTYPES, PartGatherer, of_all_ranks
from fusionrl.weights.merge import Merger
from fusionrl.weights.remote_calls import MergeSums


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
    merge_sums: MergeSums = field(default_factory=MergeSums)

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
        held = {name: (rule, part) for name, rule, part in local_adapters(self.chunks, self.shape, self.merged)}
        return Merger(held, self.merged.scale, DTYPES[self.dtype], self.merge_sums)

    def tensors(self, group: dist.ProcessGroup | None) -> list[PushTensor]:
        """Every tensor of the model with the stage that holds it; collective over `group`, of all ranks."""
        own_names = {name for name, _, _ in local_tensors(self.chunks, self.shape)}
        names = of_all_ranks(own_names, self.layout.world_size, group)
        # An output layer that is tied to the embedding stands on the last stage as well.
        # So does, with layers of multi-token prediction there, the embedding: the first stage's counts.
        held = [(name, rank) for rank, own in enumerate(names) for name in own]
        stages = {name: self.layout.coordinates(rank).pp for name, rank in reversed(held)}
        return push_tensors(self.shape, lambda rule: stages[rule.megatron], self.dtype, self.quantization)

    def settle(self) -> None:
        """Before the first gather of a push, on all ranks: the weights are in memory, and of the last step."""
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
