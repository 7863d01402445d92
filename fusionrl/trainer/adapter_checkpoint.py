"""Adapters in checkpoints: their tensors as the rules describe them, so that they load at any layout."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from fusionrl.models.hf_io import local_adapters, split_group
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec


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
