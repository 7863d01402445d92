"""Functions of autograd on a CPU by our own kernels (`kernels.py`): attention, norms and rotary embeddings of rows.

torch's attention wants sequences of one length side by side: queries, keys and values are copied there, keys and values
once a query head, and the results back; backward all of it again. The kernel reads and writes them where they are.
Norms and rotary embeddings are chains of small operations in torch, backward twice as many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.cpu import bitwise, kernels
from fusionrl.cpu.kernels import RowTable

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Angles:
    """Cosines and sines [T, 1, d / 2] of packed tokens, and what they were made of."""

    made_of: tuple[object, ...]
    scale: float
    cos: Tensor
    sin: Tensor

    def are_of(self, made_of: tuple[object, ...], scale: float) -> bool:
        """Return whether they were made of these very objects, and scaled so."""
        return self.scale == scale and all(a is b for a, b in zip(self.made_of, made_of, strict=True))


class _Rotation(torch.autograd.Function):
    """values [T, heads, d], cos and sin [T, 1, r / 2], of which the first r of d are turned → [T, heads, d]."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(values, cos[:, 0], sin[:, 0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return kernels.rotate(grad, cos[:, 0], sin[:, 0], back=True), None, None


def packed_angles(angles: Tensor, lengths: list[int]) -> Tensor:
    """[T, 1, d / 2] of packed sequences: `angles` [longest, 1, 1, d] hold each twice, or [T, 1, 1, d] of all tokens."""
    half = angles[:, 0, :, : angles.size(-1) // 2]
    return half if half.size(0) == sum(lengths) else torch.cat([half[:length] for length in lengths])


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head of `values` [T, heads, d] against each other, all tensors as `kernels.fit` tells."""
    return cast("Tensor", _Rotation.apply(values, cos, sin))


def patch_rotary(attention: ModuleType) -> None:
    """Let the attention of Megatron-core, the module that has it, turn packed queries and keys here."""
    original = attention.apply_rotary_pos_emb
    last: list[_Angles] = []  # queries and keys of all layers have the same, or one of a few

    def apply(
        t: Tensor,
        freqs: Tensor,
        config: TransformerConfig,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: ProcessGroup | None = None,
        **more: object,
    ) -> Tensor:
        """As Megatron's: `t` [T, heads, d] of packed tokens, or [s, b, heads, d] → the same shape, turned."""
        is_plain = not (config.rotary_interleaved or config.multi_latent_attention or config.apply_rope_fusion or more)
        is_plain = is_plain and freqs.size(1) == 1 and kernels.fit(t)
        if cu_seqlens is None or cp_group is None or cp_group.size() > 1 or not is_plain:
            return original(t, freqs, config, cu_seqlens, mscale, cp_group, **more)
        made_of = (freqs, cu_seqlens, t.dtype)
        known = next((angles for angles in last if angles.are_of(made_of, mscale)), None)
        if known is None:
            angles = packed_angles(freqs, cu_seqlens.diff().tolist())
            cos, sin = ((part * mscale).to(t.dtype) for part in (angles.cos(), angles.sin()))
            known = _Angles(made_of, mscale, cos, sin)
            last[:] = [known, *last[:1]]
        return rotate(t, known.cos, known.sin)

    attention.apply_rotary_pos_emb = apply  # type: ignore[attr-defined]


class _Norm(torch.autograd.Function):
    """hidden [..., h], weight [h] → hidden / sqrt(mean of its squares + eps) * weight; computed in fp32."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = kernels.rms_norm(hidden, weight, eps)
        ctx.save_for_backward(hidden, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *kernels.rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `hidden` [..., h], of the same type; torch computes what the kernels cannot."""
    if kernels.fit(hidden, weight):
        return cast("Tensor", _Norm.apply(hidden, weight, eps))
    return torch.nn.functional.rms_norm(hidden, weight.shape, weight, eps).to(hidden.dtype)


class RowNorm(torch.nn.RMSNorm):
    """torch's module, computed by `rms_norm`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] → the same shape."""
        assert self.eps is not None
        return rms_norm(hidden, self.weight, self.eps)


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
        if bitwise.is_on():
            out = _attend_tokens(query, key, value, sinks, table, scale, before)
        if sinks is not None:
            scores = sinks.float()
            if not bitwise.is_on():
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


def _attend_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: RowTable,
    scale: float,
    before: int | None,
) -> Tensor:
    """Attention as `kernels.attend_rows`, each token computed by itself as an engine decodes it."""
    tokens, slots, rows, lengths = table.attended()
    scores = None if sinks is None else sinks.float().contiguous()
    numbers = (slots, rows.contiguous(), lengths.contiguous())
    parts = query[tokens], key.contiguous(), value.contiguous()
    results = kernels.attend_decode(*parts, *numbers, scale=scale, window=before, sinks=scores)
    out = results.new_zeros(len(query), *results.shape[1:])
    out[tokens] = results
    return out


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
