"""Join the other trainer ranks: the CPU layer, Megatron's process groups, and the random number generators."""

import os
import random
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from fusionrl.base import cpu_wing
from fusionrl.base.group_stores import join_group_store
from fusionrl.base.imports import without_collections
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer import adam, megatron_versions

T = TypeVar("T")


def join_ranks(
    layout: TrainerLayout,
    rank: int,
    device: torch.device,
    address: tuple[str, int],
    *,
    seed: int,
    timeout_minutes: float,
) -> None:
    """Import Megatron with its CPU layer, meet the other ranks in the store at `address`, and seed what is random."""
    if address[0].startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu_wing.prepare_megatron()
    with without_collections():
        from megatron.core import parallel_state

    if device.type == "cpu":
        from fusionrl.cpu import megatron_patches

        megatron_patches.patch()
    megatron_versions.without_te()
    adam.patch()
    torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=join_group_store(*address, timeout.total_seconds()),
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    coordinates = layout.coordinates(rank)
    assert parallel_state.get_data_parallel_rank() == coordinates.dp, "TrainerLayout disagrees with Megatron"
    seed_rank(seed + 100 * coordinates.pp)


def seed_rank(seed: int) -> None:
    """Seed all random number generators of a rank that has met the others."""
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return each rank's `value`, on each of them, in their order; of all ranks, or of a group's."""
    everywhere = [value] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, value, group=group)
    return everywhere


def leave_ranks() -> None:
    """Leave all process groups, if there are any."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # which it forgets
        dist.destroy_process_group()
