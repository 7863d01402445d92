"""Gated delta nets (arXiv:2412.06464) in SGLang on a CPU: torch in place of the kernels that it asks for.

SGLang looks for these functions in `torch.ops.sgl_kernel` and in `sgl_kernel.mamba`, which no package of the registries
has for a CPU. Their names and parameters are SGLang's (0.5.23); `register` adds those that are missing.

Shapes: T new tokens of all requests, one request after the other, or B requests with one each; H heads of queries and
keys, HV of values, K and V their sizes; C channels of the convolution, of width w. A request has a slot in two pools,
which the functions read and write: `[slots, HV, V, K]` of the rule, and `[slots, C, w - 1]`, the last channels before
the convolution.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionrl.cpu import kernels

_CHUNK = 64  # tokens whose updates are one triangular system
_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one sequence in chunks (arXiv:2406.06484, section 3), in fp32.

    Each token scales the state by its decay, and brings the value that the state gives for its key nearer to its own,
    by a share of `beta`; it then reads the state by its query.

    Queries and keys [T, H, K] are normed here, and HV / H heads of values [T, HV, V] share one; `decay` [T, HV] is the
    logarithm of the factor, and `state` [HV, V, K] that before the first token. Returns ([T, HV, V], the state after
    the last token).
    """
    query, key = _unit_heads(query, key, value.size(1))
    query, key, value, state = *(x.transpose(0, 1) for x in (query, key, value.float())), state.float()
    decay, beta, outs = decay.float().t(), beta.float().t(), []
    for start in range(0, value.size(1), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        q, k, v, b = query[:, chunk], key[:, chunk], value[:, chunk], beta[:, chunk, None]
        # [HV, n, 1] since the chunk's begin; in fp32, differences would be off by 4e-6 where a head forgets quickly.
        total = decay[:, chunk].double().cumsum(1)[..., None]
        between = (total - total.mT).float().tril().exp().tril()  # [HV, n, n] from a token to a later one
        faded = total.float().exp()
        new = b * (v - (k * faded) @ state.mT)
        # A token's update sees those before it: (1 + the strictly lower part) updates = new.
        updates = torch.linalg.solve_triangular(b * (k @ k.mT) * between, new, upper=False, unitriangular=True)
        outs.append((q * faded) @ state.mT + (q @ k.mT * between) @ updates)
        left = (total[:, -1:] - total).float().exp()
        state = state * total[:, -1:].float().exp() + updates.mT @ (k * left)
    return torch.cat(outs, 1).transpose(0, 1), state


def _unit_heads(query: Tensor, key: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Queries, divided by the root of their size, and keys of length 1 in fp32, one for each head of values."""
    query, key = (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeat = num_heads // key.size(-2)
    return (query * query.size(-1) ** -0.5).repeat_interleave(repeat, -2), key.repeat_interleave(repeat, -2)


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(logarithm of the decay, beta), [1, T, HV] fp32 each, of a and b [T, HV]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, None]:
    """Several new tokens a request: [1, T, HV, V]. SGLang takes its states from `initial_state`, the pool."""
    assert use_qk_l2norm_in_kernel and not head_first
    out, starts = torch.empty_like(v), cu_seqlens.tolist()
    for start, end, slot in zip(starts, starts[1:], initial_state_indices.tolist(), strict=False):
        if end > start:
            at = 0, slice(start, end)
            out[at], initial_state[slot] = delta_rule(q[at], k[at], v[at], g[at], beta[at], initial_state[slot])
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """One new token a request, [1, B, HV, V]: `fused_gdn_gating_cpu`, then the rule."""
    assert use_qk_l2norm_in_kernel and (softplus_beta, softplus_threshold) == (1.0, 20.0)
    decay, beta = (x[0] for x in fused_gdn_gating_cpu(A_log, a, b, dt_bias))
    slots = initial_state_indices[: len(decay)].long()
    if initial_state_source.dtype is torch.float32 and kernels.fit(q, k, v):
        return kernels.delta_decode(q[0], k[0], v[0], decay.exp(), beta, initial_state_source, slots)[None]
    query, key = _unit_heads(q[0], k[0], v.size(2))
    state = initial_state_source[slots].float() * decay.exp()[..., None, None]
    update = (v[0].float() - (state @ key[..., None])[..., 0]) * beta[..., None]
    state += update[..., None] * key[..., None, :]
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return (state @ query[..., None])[..., 0].to(v.dtype)[None]


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: object = None,
) -> Tensor:
    """Convolve each channel of x [C, T] with `weight` [C, w] over its request's tokens, in fp32 as trainers do."""
    out, starts, width = torch.empty_like(x), query_start_loc.tolist(), weight.size(-1)
    rows = zip(starts, starts[1:], cache_indices.tolist(), has_initial_state.tolist(), strict=False)
    for start, end, slot, has_state in rows:
        if end > start:
            before = conv_states[slot].to(x.dtype) if has_state else x.new_zeros(len(x), width - 1)
            channels = torch.cat([before, x[:, start:end]], 1)
            kernel = weight.view(len(x), 1, width).float()
            shift = None if bias is None else bias.float()
            convolved = F.conv1d(channels[None].float(), kernel, shift, groups=len(x))[0]
            out[:, start:end] = _ACTIVATIONS[activation](convolved)
            conv_states[slot] = channels[:, 1 - width :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve the newest token of each request, x [B, C], in fp32."""
    slots = conv_state_indices[: len(x)].long()
    channels = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], -1)  # [B, C, w]
    conv_state[slots] = channels[..., 1:].to(conv_state.dtype)
    convolved = (channels.float() * weight.view(-1, channels.size(-1)).float()).sum(-1)
    return _ACTIVATIONS[activation](convolved if bias is None else convolved + bias.float()).to(x.dtype)


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`silu(gate) * norm(x)` [..., V]."""
    rows = x.float()
    normed = (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return (normed * F.silu(gate.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm of each head, whose weight is stored less 1: [tokens * heads, head_dim] each."""

    def norm(heads: Tensor, weight: Tensor) -> Tensor:
        rows = heads.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        return (rows * (1.0 + weight.float())).to(heads.dtype)

    return norm(q.reshape(-1, head_dim), q_weight), norm(k.reshape(-1, head_dim), k_weight)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries, each of which its gate follows, and keys; then the gates, [tokens, heads * head_dim]."""
    q, gate = q_gate.view(len(q_gate), num_heads, 2 * head_dim).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(len(gate), -1)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by its gate in its place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys and values [T, C], z [T, HV, V], b and a [T, HV]) of two projections with one after the other."""
    values = num_value_heads * value_dim
    qkv, z = qkvz.split([2 * num_key_heads * key_dim + values, values], -1)
    b, a = ba.split([num_value_heads, num_value_heads], -1)
    return qkv.contiguous(), z.reshape(len(z), num_value_heads, value_dim), b.contiguous(), a.contiguous()


_OPERATIONS = (
    *(fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu, fused_rmsnorm_gated_cpu),
    *(fused_qk_gemma_rmsnorm_cpu, fused_qk_gemma_rmsnorm_with_gate_cpu, fused_sigmoid_mul_cpu),
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
)
OPERATIONS = {function.__name__: function for function in _OPERATIONS}
"""Functions of `torch.ops.sgl_kernel`."""
_MAMBA = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)


def register() -> None:
    """Add what SGLang's kernels lack, for models that are imported later. Idempotent."""
    operations = torch.ops.sgl_kernel
    if not hasattr(operations, "chunk_gated_delta_rule_cpu"):
        sys.modules["sgl_kernel.mamba"] = module = types.ModuleType("sgl_kernel.mamba")
        vars(module).update({function.__name__: function for function in _MAMBA})
    for name, function in OPERATIONS.items():
        if not hasattr(operations, name):
            setattr(operations, name, function)
