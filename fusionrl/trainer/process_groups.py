"""Join the other trainer ranks: the CPU layer, Megatron's process groups, and the random number generators."""

import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fusionrl.base import cpu_wing
from fusionrl.base.group_stores import join_group_store
from fusionrl.base.imports import without_collections
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer import megatron_core

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
    megatron_core.without_te()
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


def rng_state() -> dict[str, Any]:
    """This rank's random number generators: Python, numpy, torch, the device's and Megatron's tracker."""
    from megatron.core import tensor_parallel

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` gave."""
    from megatron.core import tensor_parallel

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return each rank's `value`, on each of them, in their order; of all ranks, or of a group's."""
    everywhere = [value] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, value, group=group)
    return everywhere


def sum_over_context_ranks() -> Callable[[Tensor], Tensor] | None:
    """Return the function that sums a tensor over these ranks, as its backward does; None where there is one rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return None if group.size() == 1 else lambda values: _Sum.apply(values, group)


class _Sum(torch.autograd.Function):
    """The sum over a group's ranks, in either direction. Megatron's functions reduce no gradient that is expanded;
    torch's `distributed.nn.functional.all_reduce` is deprecated, and warns of it in every rank."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


def leave_ranks() -> None:
    """Leave all process groups, if there are any."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # which it forgets
        dist.destroy_process_group()
