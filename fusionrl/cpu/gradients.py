"""Gradients and weights on a CPU stay where they are: without full copies of them.

New memory is mapped page by page on a CPU, so a copy of all gradients costs about as much as the step of the optimizer.
Megatron-core leaves it to CUDA extensions to avoid some copies: the gradient of a weight is written to memory of its
own and then added to the sum, clipping scales into new memory, and gloo copies all even where there is one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    Collective = Callable[..., Work | None]


def patch() -> None:
    """Let Megatron-core use what is here. Once a process."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add_gradient, wgrad_gemm_accum_fp16=add_gradient
    )
    layers._grad_accum_fusion_available = True
    clip_grads.multi_tensor_scale_impl = scale
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


def add_gradient(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add grad.T @ inputs, a layer's output's grad [T, out] and its inputs [T, in], to `total` [out, in]."""
    if grad.dtype is total.dtype:
        total.addmm_(grad.t(), inputs)
    else:
        total.add_(grad.t() @ inputs)


def scale(chunk_size: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float | Tensor) -> None:
    """Scale `tensors[0]` into `tensors[1]`, in place where these are the same; the other arguments are a kernel's."""
    for source, target in zip(*tensors, strict=True):
        if source is target:
            target.mul_(factor)
        else:
            target.copy_(source * factor)


def unless_alone(collective: Collective) -> Collective:
    """`collective(output, input, ...)` of a buffer and a rank's part of it, which with one rank are the same."""

    @functools.wraps(collective)
    def call(
        output: Tensor,
        inputs: Tensor,
        *args: object,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        **kwargs: object,
    ) -> Work | None:
        if async_op or group is None or group.size() > 1:
            return collective(output, inputs, *args, group=group, async_op=async_op, **kwargs)
        if output.data_ptr() != inputs.data_ptr():
            output.copy_(inputs)
        return None

    return call
