"""RMSNorm on a CPU as one function of autograd, by our own kernel (`kernels.py`).

torch has a kernel of it for GPUs; on a CPU it is a chain of small operations, backward twice as many.
"""

from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.cpu import kernels


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
