"""Context parallelism: each rank holds two pieces of every sequence, and some tokens of every sample."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import FunctionCtx


def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the packed sequence that `cp_rank` holds, in its local order.

    Each sequence is cut into 2 * cp pieces, of which rank r holds the r-th and the r-th from the end, so that
    causal attention costs every rank the same. Every length must be a multiple of 2 * cp_size, for cp_size > 1.
    """
    start, pieces = 0, [torch.zeros(0, dtype=torch.long)]
    for length in lengths:
        if cp_size == 1:
            pieces.append(torch.arange(start, start + length))
        else:
            assert length % (2 * cp_size) == 0, f"length {length} is not a multiple of {2 * cp_size}"
            piece = length // (2 * cp_size)
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
                pieces.append(torch.arange(start + index * piece, start + (index + 1) * piece))
        start += length
    return torch.cat(pieces)


def whole_row(part: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[t, ...] of each rank's tokens -> [T, ...] in the packed row's order, on each of them.

    The gradient of each part is summed over the ranks.
    """
    order = torch.cat([zigzag_positions(lengths, group.size(), rank) for rank in range(group.size())])
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return gather_from_sequence_parallel_region(part.contiguous(), True, group).index_select(0, places.to(part.device))


def sum_over_context_ranks() -> Callable[[Tensor], Tensor] | None:
    """Return the function that sums a tensor over these ranks, as its backward does; None where there is one rank."""
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
