"""Layers of SGLang engines on a CPU by our own kernels (`kernels.py`), patched into SGLang.

Without CPU kernels of its own, SGLang computes norms, gates and rotary embeddings by a chain of operations in torch
each. SGLang still computes what a kernel does not do (other types, other kinds of embeddings).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fusionrl.cpu import kernels

Path: TypeAlias = Callable[..., object]
_PATH = "forward_native"  # its name in every SGLang layer


def register() -> None:
    """Let the layers of this process, and of those forked from it, use the kernels. Idempotent."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    if kernels.loaded():
        _replace(RMSNorm, _norm)
        _replace(SiluAndMul, _gate)
        _replace(RotaryEmbedding, _rotary)
        _replace_function("sglang.srt.models.utils", "apply_qk_norm", _head_norms, "sglang.srt.models.")
        _replace_function("sglang.srt.mem_cache.memory_pool", "_set_kv_buffer_impl", _store)


def _replace(layer: type, make: Callable[[Path], Path]) -> None:
    """Replace the layer's torch path by `make(original)`; subclasses that define their own path keep it."""
    original: Path = getattr(layer, _PATH)
    if not getattr(original, "is_kernel", False):
        path = make(original)
        path.is_kernel = True  # type: ignore[attr-defined]
        setattr(layer, _PATH, path)


def _replace_function(module: str, name: str, make: Callable[[Path], Path], users: str = "") -> None:
    """Replace a function by `make(original)`, also in modules below `users` that imported it by name."""
    original: Path = getattr(importlib.import_module(module), name)
    if getattr(original, "is_kernel", False):
        return
    path = make(original)
    path.is_kernel = True  # type: ignore[attr-defined]
    holders = [holder for key, holder in sys.modules.items() if key == module or (users and key.startswith(users))]
    for holder in holders:
        if vars(holder).get(name) is original:
            setattr(holder, name, path)


def _fit(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these tensors; none of them computes a gradient here."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not needs_grad and kernels.fit(*tensors)


def _norm(original: Path) -> Path:
    """RMSNorm's path: by the kernel where that computes the same, else `original`."""

    def forward_native(
        self: torch.nn.Module,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """RMSNorm of x [..., h]; with `residual` (x + residual normed, x + residual), [..., h] each.

        Further arguments serve the paths of other devices: SGLang's path for a CPU ignores them.
        """
        if post_residual_addition is not None or not _is_plain(self, x):
            return original(self, x, residual, post_residual_addition, *args, **kwargs)
        weight, eps = self.weight, self.variance_epsilon
        if residual is None:
            return kernels.rms_norm(x, weight, eps)[0] if _fit(x, weight) else original(self, x)
        if residual.shape != x.shape or not _fit(x, residual, weight):
            return original(self, x, residual)
        return kernels.add_rms_norm(x, residual, weight, eps)

    return forward_native


def _is_plain(norm: torch.nn.Module, x: Tensor) -> bool:
    """Return whether the norm is over whole rows, and rounds once, to x's type."""
    is_same = getattr(norm, "override_orig_dtype", None) in (None, x.dtype)  # of the output
    if x.dtype is not torch.float32 and (norm.cast_x_before_out_mul or norm.fp32_residual):
        return False
    return is_same and norm.variance_size_override is None and x.size(-1) == norm.weight.numel() == norm.hidden_size


def _gate(original: Path) -> Path:
    """SiluAndMul's path: by the kernel where that computes the same, else `original`."""

    def forward_native(self: torch.nn.Module, x: Tensor) -> object:
        """`silu(gate) * up` [..., f] of x [..., 2 f], the gate first."""
        return kernels.swiglu(x) if _fit(x) else original(self, x)

    return forward_native


def _rotary(original: Path) -> Path:
    """RotaryEmbedding's path: by the kernel where that computes the same, else `original`."""

    def forward_native(
        self: torch.nn.Module,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Turn queries and keys by their tokens' angles: new tensors of their shapes.

        Args:
            positions: [T] of the tokens
            query, key: [T, heads * size], which differ in their numbers of heads
            offsets: added to the positions, by SGLang's path
        """
        angles = self.cos_sin_cache  # [positions, r]: cosines, then sines
        is_other = args or offsets is not None or any(value is not None for value in kwargs.values())
        is_plain = self.is_neox_style and positions.dtype is torch.int64 and not hasattr(self, "sin_cos_cache")
        if is_other or not is_plain or not _fit(query, key, angles):
            return original(self, positions, query, key, offsets, *args, **kwargs)
        shapes = query.shape, key.shape
        query, key = (values.flatten(1) for values in (query, key))
        turned = kernels.rotate_both(query, key, angles, positions.flatten(), self.head_size)
        return tuple(values.view(shape) for values, shape in zip(turned, shapes, strict=True))

    return forward_native


def _head_norms(original: Path) -> Path:
    """`apply_qk_norm`: by the kernel where that computes the same, else `original`."""

    def apply_qk_norm(
        q: Tensor,
        k: Tensor,
        q_norm: torch.nn.Module,
        k_norm: torch.nn.Module,
        head_dim: int,
        alt_stream: object = None,
        allow_inplace: bool = True,
    ) -> object:
        """RMSNorm of each head of q [T, heads * head_dim] and k; in their place, as SGLang's kernels for GPUs do it."""
        if not allow_inplace or not _are_heads(q, k, q_norm, k_norm, head_dim):
            return original(q, k, q_norm, k_norm, head_dim, alt_stream, allow_inplace)
        kernels.norm_heads(q, q_norm.weight, k, k_norm.weight, q_norm.variance_epsilon)
        return q, k

    return apply_qk_norm


def _are_heads(q: Tensor, k: Tensor, q_norm: torch.nn.Module, k_norm: torch.nn.Module, size: int) -> bool:
    """Return whether `kernels.norm_heads` norms these as SGLang's RMSNorm does."""
    from sglang.srt.layers.layernorm import RMSNorm

    if type(q_norm) is not RMSNorm or type(k_norm) is not RMSNorm or q_norm.variance_epsilon != k_norm.variance_epsilon:
        return False
    is_flat = (
        q.dim() == k.dim() == 2
        and q.size(0) == k.size(0)
        and q.stride(1) == k.stride(1) == 1
        and q.size(1) % size == k.size(1) % size == 0
    )
    weights = q_norm.weight, k_norm.weight
    if not is_flat or not all(weight.is_contiguous() for weight in weights) or not _fit(q, k, *weights):
        return False
    return _is_plain(q_norm, q[:, :size]) and _is_plain(k_norm, k[:, :size])


def _store(original: Path) -> Path:
    """The cache's `_set_kv_buffer_impl`: by the kernel where that writes the same, else `original`."""

    def _set_kv_buffer_impl(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Write k [T, heads, size] and v into the slots `indices` [T] of the cache.

        Raises:
            IndexError: a slot is beyond the cache, or negative, which torch would count from the end.
        """
        if not _are_rows(k, v, k_cache, v_cache, indices):
            return original(k, v, k_cache, v_cache, indices, *args, **kwargs)
        kernels.store_rows(k, v, k_cache, v_cache, indices)
        return None

    return _set_kv_buffer_impl


def _are_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor) -> bool:
    """Return whether `kernels.store_rows` can take these tensors."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        is_dense = rows.dim() == cache.dim() == 3 and rows.stride()[1:] == (rows.size(2), 1) and cache.is_contiguous()
        if not is_dense or rows.shape[1:] != cache.shape[1:] or rows.size(0) != indices.numel():
            return False
    is_list = indices.dtype is torch.int64 and indices.dim() == 1 and indices.is_contiguous()
    return is_list and k_cache.size(0) == v_cache.size(0) and _fit(k, v, k_cache, v_cache)
