"""Several adapters on one model: one of them is in the model, the states of the others wait in host memory.

A state is all that a run of its own would have changed: the adapter's parameters, their fp32 master weights and
moments, the optimizer's step counts, the position in the schedule, counters, skipped steps and RNG states. It comes
back bit for bit. In checkpoints an adapter is its tensors as the rules describe them, and loads at any layout.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from fusionrl.models.hf_io import gather_params, local_adapters, split_group
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.trainer.host_memory import WeightSet, optimizer_tensors
from fusionrl.trainer.model import Trained
from fusionrl.trainer.process_groups import rng_state, set_rng_state

if TYPE_CHECKING:
    from fusionrl.trainer.steps import SkipWatch


@dataclass
class Progress:
    """What a rank counts of an adapter: as `ModelRank.counters`, and the skipped steps in a row."""

    counters: dict[str, int]
    skips: SkipWatch


@dataclass
class _State:
    """The state of an adapter; of the one in the model, as it was when it came there."""

    progress: Progress
    weights: WeightSet  # its parameters, and the rest of its tensors in `optimizer`
    optimizer: WeightSet
    steps: list[object]  # of the optimizer's groups
    scheduled: int  # position in the schedule
    rng: dict[str, Any]  # RNG states of this rank


class AdapterStates:
    """The adapters of a rank by name, of which `current` is in the model. All begin with what the model has now."""

    def __init__(self, trained: Trained, names: Sequence[str], progress: Progress) -> None:
        self._trained, self.current = trained, names[0]
        self._states = {name: self._taken(copy.deepcopy(progress)) for name in names}

    @property
    def progress(self) -> Progress:
        """Of the adapter in the model."""
        return self._states[self.current].progress

    def order(self) -> list[str]:
        """Return the names, that of the adapter in the model first."""
        return sorted(self._states, key=lambda name: name != self.current)

    def switch(self, name: str) -> None:
        """Bring an adapter into the model, in place of the one that is there."""
        if name == self.current:
            return
        gather_params(self._trained.chunks)
        before, state = self._states[self.current], self._states[name]
        before.weights.update()
        before.optimizer.rebind(optimizer_tensors(self._trained)).update()
        before.steps, before.scheduled, before.rng = self._steps(), self._trained.scheduler.num_steps, rng_state()
        state.weights.put_back()
        state.optimizer.rebind(optimizer_tensors(self._trained)).put_back()
        for group, step in zip(self._trained.optimizer.param_groups, state.steps, strict=True):
            group["step"] = step
        self._trained.scheduler.num_steps = state.scheduled
        self._trained.scheduler.step(0)  # the rates of this position
        set_rng_state(state.rng)
        self.current = name

    def lent(self, name: str) -> AbstractContextManager[None]:
        """Within it the model computes with an adapter's parameters. Nothing may be trained or saved there."""
        return nullcontext() if name == self.current else self._states[name].weights.lent()

    def note(self, rollout_id: int) -> None:
        """Note that all adapters have learned what they learn of a rollout."""
        for state in self._states.values():
            state.progress.counters["rollout_id"] = rollout_id

    def _taken(self, progress: Progress) -> _State:
        parameters = [p for chunk in self._trained.chunks for p in chunk.parameters() if p.requires_grad]
        weights, optimizer = (
            WeightSet((t, t) for t in tensors) for tensors in (parameters, optimizer_tensors(self._trained))
        )
        return _State(progress, weights, optimizer, self._steps(), self._trained.scheduler.num_steps, rng_state())

    def _steps(self) -> list[object]:
        return [group.get("step", 0) for group in self._trained.optimizer.param_groups]


def sharded_adapters(
    chunks: list[torch.nn.Module], shape: ModelShape, spec: AdapterSpec
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Megatron name → this rank's part of each tensor of the adapters, as Megatron's checkpoints describe it."""
    return {name: _sharded(rule, tensor) for name, rule, tensor in local_adapters(chunks, shape, spec)}


def _sharded(rule: Rule, tensor: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """Describe a part as shards; one of gate over up in one tensor is two."""
    group = split_group(rule)
    rank, size = (0, 1) if rule.split == "replicated" else (group.rank(), group.size())
    share = rule.share(rank, size)
    count = len(share.slices)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if rule.expert is not None:
        replicas = parallel_state.get_expert_data_parallel_group()
    replica = (0, group.rank() if size == 1 else 0, replicas.rank())

    def shards(key: str, whole: Tensor, replica_id: ReplicaId, _: slice | None = None) -> list[ShardedTensor]:
        places = ((share.dim, number * size + rank, count * size) for number in range(count))
        parts = whole.chunk(count, share.dim) if count > 1 else [whole]
        return [
            ShardedTensor.from_rank_offsets(key, part, place, replica_id=replica_id)
            for part, place in zip(parts, places, strict=True)
        ]

    if count == 1:
        return shards(rule.megatron, tensor, replica)[0]
    return ShardedTensorFactory(rule.megatron, tensor, shards, lambda parts: torch.cat(parts, share.dim), replica)
