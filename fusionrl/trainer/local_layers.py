"""Local layers: without Transformer Engine, on a CPU or a GPU. Their spec, norms, projections and gated products.

Megatron-core's own local spec has no norm that marks its weights for sequence parallelism, and an attention that
`local_attention.py` replaces. `silu(gate) * up` and `gelu(gate) * up` are one function of autograd
each, which keeps its input alone and writes that input's gradient in place: autograd by itself keeps three tensors of
an MLP's width. In torch that saves memory, and no time; on a CPU the wing's kernel saves time, too.
"""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.base import cpu_wing
from fusionrl.trainer.local_attention import SDPACoreAttention


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


swiglu, geglu = _SwiGLU.apply, _GeGLU.apply
# Name in a model's shape → (activation of the gate, the gated product).
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (F.silu, swiglu),
    "gelu_tanh": (gelu_tanh, geglu),
}


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of this rank's decoder layers: dense or with experts, as `moe_layer_freq` says of each."""
    latent = config.multi_latent_attention
    if latent:
        # The attention asks what its down projections are, and knows a plain one by this name only.
        multi_latent_attention.Linear = DuplicatedLinear

    def layer_spec(num_experts: int | None) -> ModuleSpec:
        """Megatron's local layer, dense or with experts, with the norms and attention of this file in it."""
        spec: ModuleSpec = get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
            normalization=config.normalization,
        )
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
        attention = layer.self_attention.submodules
        attention.core_attention = SDPACoreAttention
        if latent:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
            attention.kv_layernorm = LocalNorm
            attention.q_layernorm = LocalNorm if config.q_lora_rank is not None else IdentityOp
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
        return spec

    has_experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: layer_spec(config.num_moe_experts if kind else None) for kind in set(has_experts)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [specs[kind] for kind in has_experts[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalNorm)


class DuplicatedLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank holds whole, without bias: the compression of latent attention.

    Megatron's local spec splits it and gathers the result; the positional part of the keys, which all heads share,
    then gets the gradient of its own rank's heads alone, because the backward pass of that gather only cuts. Here the
    weight is whole, as in Transformer Engine's spec: each rank sees its part of the sequence, and the gradients of the
    weight are summed over the ranks with those of the norms. (Without sequence parallelism Megatron would sum the
    gradients of latent attention's norms twice; the plan refuses that.)
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., input] → ([..., output], no bias)."""
        return F.linear(hidden, self.weight), None


class LocalMLP(MLP):
    """Megatron's MLP; one with biases, or with a gate that is not plain, runs Megatron's forward pass."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → the same shape, and no bias."""
        product = self._product
        if per_token_scale is not None or product is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(product(both))

    @property
    def _product(self) -> Callable[[Tensor], Tensor] | None:
        """The gated product, if fusionrl has it and nothing is changed in it."""
        config = self.config
        product = next((ours for gate, ours in ACTIVATIONS.values() if gate is config.activation_func), None)
        is_changed = config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0
        is_fused = config.use_te_activation_func or config.bias_activation_fusion
        return None if not config.gated_linear_unit or is_changed or is_fused or config.add_bias_linear else product
