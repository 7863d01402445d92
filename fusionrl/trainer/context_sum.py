"""Sums over the context-parallel ranks, each of which has some tokens of every sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import FunctionCtx


def sum_over_context_ranks() -> Callable[[Tensor], Tensor] | None:
    """Return the function that sums a tensor over these ranks, with its gradient; None where there is one rank."""
    group = parallel_state.get_context_parallel_group()
    return None if group.size() == 1 else lambda values: _Sum.apply(values, group)


class _Sum(torch.autograd.Function):
    """The sum over a group's ranks; the gradient of each one's part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
