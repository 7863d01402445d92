"""Rotary embeddings of packed sequences as one function of autograd, on a CPU by our own kernel
(`kernels.py`); what it cannot do, Megatron-core does.

By itself autograd runs over queries and keys a dozen times a layer, and Megatron-core makes the cosines anew for each
of the two and for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.cpu import kernels

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


def patch(attention: ModuleType) -> None:
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
