"""The gradients of the last step, whole and under Hugging Face names: what proves that two layouts are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.models import families
from fusionrl.models.hf_io import iter_hf_tensors
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.model import Trained


@contextmanager
def _summed(trained: Trained) -> Iterator[None]:
    """Within it every rank's gradient buffers hold the sums over the data-parallel ranks, not its own shard of them."""
    saved: list[tuple[Tensor, Tensor]] = []
    for chunk in trained.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                data = bucket.grad_data
                saved.append((data, data.clone()))
                shard = data.view(ranks.size(), -1)[ranks.rank()].clone()
                dist.all_gather_into_tensor(data, shard, group=ranks)
    try:
        yield
    finally:
        for data, before in saved:
            data.copy_(before)


@torch.no_grad()
def whole_gradients(trained: Trained, shape: ModelShape) -> dict[str, Tensor]:
    """Hugging Face name → gradient, fp32 on the host, after a `train_step`; collective, the same on every rank.

    Gradients are those that the optimizer saw: clipped where they were clipped. A tied embedding has the sum over
    both of its uses.
    """
    with _summed(trained):
        tensors = iter_hf_tensors(trained.chunks, trained.transformer, shape, value_of=lambda param: param.main_grad)
        buffers = {hf for rule in families.model_rules(shape).values() if rule.buffer for hf in rule.hf}
        return {name: tensor.float().cpu().clone() for name, tensor in tensors if name not in buffers}
