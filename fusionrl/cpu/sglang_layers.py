"""Layers of SGLang engines on a CPU by our own kernels (`kernels.py`), patched into SGLang.

Without CPU kernels of its own, SGLang computes norms, gates and rotary embeddings by a chain of operations in torch
each. SGLang still computes what a kernel does not do (other types, other kinds of embeddings).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusionrl.cpu import kernels

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

Path: TypeAlias = Callable[..., object]


def register_layers() -> None:
    """Let the layers of this process, and of those forked from it, use the kernels.

    A layer's own torch path is replaced; subclasses that define theirs keep it.
    """
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    if kernels.loaded():
        for layer, make in ((RMSNorm, _norm), (SiluAndMul, _gate), (RotaryEmbedding, _rotary)):
            layer.forward_native = make(layer.forward_native)


def _fit(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these tensors; none of them computes a gradient here."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not needs_grad and kernels.fit(*tensors)


def _norm(original: Path) -> Path:
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
    def forward_native(self: torch.nn.Module, x: Tensor) -> object:
        """`silu(gate) * up` [..., f] of x [..., 2 f], the gate first."""
        return kernels.swiglu(x) if _fit(x) else original(self, x)

    return forward_native


def _rotary(original: Path) -> Path:
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

        positions   [T] of the tokens
        query, key  [T, heads * size], which differ in their numbers of heads
        offsets     added to the positions, by SGLang's path
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


def draw(probs: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Draw a token of each row of `probs` [B, V], non-negative, which need not sum to 1 → [B] int64.

    numbers  in [0, 1), float64 [B], from which the tokens follow; None: torch draws new ones

    Sums are float64: a token of probability 1e-12 is drawn as often as it should be. One of probability 0 never is.
    If a row is not a distribution, as after an overflow, `torch.multinomial` raises RuntimeError, as SGLang expects.
    """
    ends = probs.cumsum(1, dtype=torch.float64)
    totals = ends[:, -1:]
    if not (torch.isfinite(totals) & (totals > 0)).all():
        return torch.multinomial(probs, num_samples=1)[:, 0]
    if numbers is None:
        numbers = torch.rand(len(probs), dtype=torch.float64)
    targets = numbers[:, None] * totals
    below = torch.nextafter(totals, torch.zeros_like(totals))  # where rounding has brought a target to the end
    return torch.searchsorted(ends, targets.minimum(below), right=True)[:, 0]


def seeded_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (seed, position) [B] int64 → [B] float64, by SplitMix64's output function.

    SGLang hashes (seed, position, token) for every token of the vocabulary. One number a row is enough for `draw`.
    """
    with np.errstate(over="ignore"):  # products of 64 bits wrap
        bits = seeds.numpy().astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        bits += positions.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def draw_filtered(
    probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None, numbers: Tensor, max_top_k: int | None
) -> Tensor:
    """`draw` among the tokens of `probs` [B, V] that top-k, top-p and min-p leave, as SGLang filters them → [B] int64.

    top_ks, top_ps, min_ps [B]; `max_top_k`: the largest of `top_ks`, None: a row has no bound.
    """
    if max_top_k is not None and max_top_k < probs.size(1):
        kept, tokens = probs.topk(max_top_k)
    else:
        kept, tokens = probs.sort(descending=True, stable=True)
    is_beyond = (kept.cumsum(1) - kept > top_ps[:, None]) | (torch.arange(kept.size(1)) >= top_ks[:, None])
    if min_ps is not None:
        is_beyond |= kept < kept[:, :1] * min_ps[:, None]
    return tokens.gather(1, draw(kept.masked_fill(is_beyond, 0.0), numbers)[:, None])[:, 0]


def register_sampling(*, reads_seeds: bool = True) -> None:
    """Let SGLang's sampler of this process, and of those forked from it, use `draw`, with the seeds of the requests.

    SGLang reads `sampling_seed` only with deterministic inference, which on a CPU starts Triton's kernels.

    reads_seeds  off where the server speculates: SGLang would hash the seeds of drafts by a kernel for CUDA
    """
    from sglang.srt.layers import sampler
    from sglang.srt.sampling import sampling_batch_info

    by_probs, filtered = sampler.sampling_from_probs_torch, sampler.top_k_top_p_min_p_sampling_from_probs_torch
    of_batch = sampling_batch_info.SamplingBatchInfo.from_schedule_batch.__func__

    def sampling_from_probs(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if probs.device.type != "cpu":
            return by_probs(probs, sampling_seed, positions)
        numbers = None
        if sampling_seed is not None and positions is not None:
            numbers = seeded_numbers(sampling_seed, positions)
        return draw(probs, numbers).to(torch.int32)

    def sampling_from_filtered(
        probs: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        need_min_p_sampling: bool,
        sampling_seed: Tensor | None,
        positions: Tensor,
        *,
        return_filtered_probs: bool = False,
        max_top_k: int | None = None,
    ) -> object:
        if sampling_seed is None or return_filtered_probs or probs.device.type != "cpu":
            seed = sampling_seed if probs.device.type != "cpu" else None  # SGLang's hash has no kernel for a CPU here
            arguments = probs, top_ks, top_ps, min_ps, need_min_p_sampling, seed, positions
            return filtered(*arguments, return_filtered_probs=return_filtered_probs, max_top_k=max_top_k)
        numbers = seeded_numbers(sampling_seed, positions)
        least = min_ps if need_min_p_sampling else None
        return draw_filtered(probs, top_ks, top_ps, least, numbers, max_top_k).to(torch.int32)

    def from_schedule_batch(cls: type[SamplingBatchInfo], batch: ScheduleBatch, vocab_size: int) -> SamplingBatchInfo:
        info = of_batch(cls, batch, vocab_size)
        if info.sampling_seed is None:
            info.sampling_seed = torch.tensor([_seed_of(request) for request in batch.reqs], dtype=torch.int64)
        return info

    sampler.sampling_from_probs_torch = sampling_from_probs
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sampling_from_filtered
    if reads_seeds:
        sampling_batch_info.SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _seed_of(request: Req) -> int:
    """Return a request's own seed, or one that is drawn once: SGLang would give the same one to every request."""
    seed = request.sampling_params.sampling_seed
    if seed is None:
        seed = vars(request).setdefault("drawn_seed", int(torch.randint(2**62, ())))
    return int(seed)
