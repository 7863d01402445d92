"""RMSNorm on a CPU as one function of autograd.

torch has a kernel of it for GPUs; on a CPU it is a chain of small operations, backward twice as many. Our own kernel
computes it (`kernels.py`), where there is one.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.cpu import kernels


class _Norm(torch.autograd.Function):
    """hidden [..., h], weight [h] → hidden / sqrt(mean of its squares + eps) * weight; computed in fp32."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        if kernels.fit(hidden, weight):
            out, scale = kernels.rms_norm(hidden, weight, eps)
            ctx.save_for_backward(hidden, weight, scale)
            return out
        rows = hidden.float()
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = (length.square_() / rows.size(-1)).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(hidden, weight, scale)
        return (rows * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        if kernels.fit(grad, hidden, weight):
            return *kernels.rms_norm_backward(grad, hidden, weight, scale), None
        normed, of_output = hidden.float() * scale, grad.float()
        product = (of_output * normed).flatten(0, -2)
        mean = (product @ weight.float() / weight.numel()).view(scale.shape)  # of gradient · output's direction
        out = (of_output * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return out.to(hidden.dtype), product.sum(0).to(weight.dtype), None


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `hidden` [..., h], of the same type."""
    return cast("Tensor", _Norm.apply(hidden, weight, eps))


class RowNorm(torch.nn.RMSNorm):
    """torch's module, computed by `rms_norm`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] → the same shape."""
        assert self.eps is not None
        return rms_norm(hidden, self.weight, self.eps)
