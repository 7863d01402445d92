"""The norms and gated products of local layers: without Transformer Engine, on a CPU or a GPU.

Norms mark their weights for sequence parallelism. `silu(gate) * up` and `gelu(gate) * up` are one function of autograd
each, which keeps its input alone and writes that input's gradient in place: autograd by itself keeps three tensors of
an MLP's width. In torch that saves memory, and no time; on a CPU the wing's kernel saves time, too.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.base import cpu_wing


class LocalNorm(torch.nn.Module):
    """Builds an RMSNorm, torch's on a GPU, its weight marked for the gradient all-reduce of sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        assert config.normalization == "RMSNorm", config.normalization
        return _norm(config, hidden_size, eps, config.layernorm_zero_centered_gamma)


class PlainNorm(torch.nn.Module):
    """Builds a `LocalNorm` that multiplies by its weight whatever the other norms of the model do."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
        return _norm(config, hidden_size, eps, False)


def _norm(config: TransformerConfig, hidden_size: int, eps: float, is_zero_centered: bool) -> torch.nn.RMSNorm:
    kind = torch.nn.RMSNorm
    if cpu_wing.lacks_cuda():
        from fusionrl.cpu.row_functions import RowNorm as kind
    if is_zero_centered:
        kind = ZeroCenteredNorm
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] → the same shape and type."""
        weight = self.weight.float() + 1
        if cpu_wing.lacks_cuda():
            from fusionrl.cpu.row_functions import rms_norm

            assert self.eps is not None
            return rms_norm(hidden.float(), weight, self.eps).to(hidden.dtype)
        return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)


class _SwiGLU(torch.autograd.Function):
    """both [..., 2 f], the gate first → silu(gate) * up [..., f]."""

    @staticmethod
    def forward(ctx: FunctionCtx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        if kernels := _kernels(both):
            return kernels.swiglu(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        if kernels := _kernels(both, grad):
            return kernels.swiglu_backward(grad, both)
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def _kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the wing's kernels if they can compute with these tensors."""
    if tensors[0].device.type != "cpu":
        return None
    from fusionrl.cpu import kernels

    return kernels if kernels.fit(*tensors) else None


class _GeGLU(torch.autograd.Function):
    """both [..., 2 f], the gate first → gelu(gate) * up [..., f], by the approximation with tanh."""

    @staticmethod
    def forward(ctx: FunctionCtx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return gelu_tanh(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(gelu_tanh(gate), grad, out=grad_up)
        torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=grad_gate)
        return out


def gelu_tanh(gate: Tensor) -> Tensor:
    """GELU by its approximation with tanh."""
    return F.gelu(gate, approximate="tanh")


def geglu(both: Tensor) -> Tensor:
    """`gelu(gate) * up` [..., f] of gate and up side by side [..., 2 f], by the approximation with tanh."""
    return _GeGLU.apply(both)


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up` [..., f] of gate and up side by side [..., 2 f]."""
    return _SwiGLU.apply(both)


# Name in a model's shape → (activation of the gate, the gated product).
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, swiglu),
    "gelu_tanh": (gelu_tanh, geglu),
}
