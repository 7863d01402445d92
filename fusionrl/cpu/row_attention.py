"""Causal attention of a packed row of short sequences on a CPU, as one function of autograd, by our own kernel
(`kernels.py`).

torch's attention wants sequences of one length side by side: queries, keys and values are copied there, keys and values
once a query head, and the results back; backward all of it again. The kernel reads and writes them where they are.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.cpu import kernels
from fusionrl.cpu.kernels import RowTable


def plan_rows(rows: Sequence[np.ndarray], num_tokens: int) -> RowTable | None:
    """Make the table of sequences in a packed row of `num_tokens`; None without sequences or kernels.

    rows  packed tokens of each sequence, in its order; sequences may share tokens at their begin
    """
    rows = [row for row in rows if row.size]
    if not rows or not kernels.loaded():
        return None
    siblings: dict[int, list[np.ndarray]] = defaultdict(list)
    for row in rows:
        siblings[int(row[0])].append(row)
    ordered = [row for family in siblings.values() for row in family]
    is_taken = np.zeros(num_tokens, dtype=bool)
    firsts = []
    for family in siblings.values():
        for i, row in enumerate(family):
            first = int(is_taken[row].sum())
            is_prompt = np.array_equal(row[:first], family[0][:first]) and (i > 0 or not first)
            assert is_prompt, "siblings share tokens at their begin, and others none"
            firsts.append(first)
            is_taken[row] = True
    return RowTable(
        places=torch.from_numpy(np.concatenate(ordered).astype(np.int32)),
        starts=_ends([row.size for row in ordered]),
        firsts=torch.tensor(firsts),
        families=_ends([len(family) for family in siblings.values()]),
        longest=max(row.size for row in ordered),
        num_tokens=num_tokens,
        is_whole=bool(is_taken.all()),
    )


def _ends(sizes: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *sizes]))


class _RowAttention(torch.autograd.Function):
    """query [T, H, D], key [T, K, D], value [T, K, V], sinks [H] or None → [T, H, V]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        table: RowTable,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend to the window, or all before; a sink, [heads], is one more score of each query, without a value."""
        before = None if window is None else window - 1
        out, logs = kernels.attend_rows(query, key, value, table, scale, before)
        saved: tuple[Tensor, ...] = (query, key, value)
        if sinks is not None:
            scores = sinks.float()
            out *= torch.sigmoid(logs - scores)[..., None]
            logs = torch.logaddexp(logs, scores)
            saved += (out, sinks)
        ctx.save_for_backward(logs, *saved)
        ctx.table, ctx.scale, ctx.before = table, scale, before
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logs, query, key, value, *more = ctx.saved_tensors
        grads = kernels.attend_rows_backward(grad, query, key, value, logs, ctx.table, ctx.scale, ctx.before)
        of_sinks = None
        if more:
            out, sinks = more
            share = torch.exp(sinks.float() - logs)
            of_sinks = -(share * (grad * out).sum(-1, dtype=torch.float32)).sum(0).to(sinks.dtype)
        return *grads, of_sinks, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: RowTable,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence of the row to itself: [T, H, V]; 0 for tokens of no sequence.

    window  tokens that a token sees, itself included; None: all before it
    sinks   [H] scores that take part in each softmax without a value
    """
    return cast("Tensor", _RowAttention.apply(query, key, value, sinks, table, scale, window))
