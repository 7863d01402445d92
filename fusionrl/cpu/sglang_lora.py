"""Adapters (LoRA) in SGLang engines on a CPU. Its backend `torch_native` was written for GPUs; here it is mended:

* Tensors are not pinned: only a GPU has pinned memory.
* SGLang describes a batch by some twenty tensors, and in each layer works on one segment after the other, part by part.
  Here Python numbers describe it, and tokens that follow each other with the same adapter are multiplied at once.
* SGLang pads the MLP of an engine with several ranks to a multiple of 32 for each, but not the adapter, and cuts a
  rank's part out of it in the wrong place. Here the adapter is padded with zeros, too.
* Kernels for a GPU add the adapter of latent attention's `kv_b_proj`, with which attention multiplies in two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusionrl.base.imports import when_imported

if TYPE_CHECKING:
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.layers import MergedColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


class Segment(NamedTuple):
    """Tokens of a batch, one after the other, that have the same adapter."""

    rows: slice
    slot: int  # of the adapter in the engine's buffers
    rank: int
    scale: float


def register() -> None:
    """Let schedulers of this process, and of those forked from it, serve adapters; call it once."""

    def multiply(backends: ModuleType) -> None:
        kind = backends.TorchNativeLoRABackend
        kind.prepare_lora_batch, kind.forward_with_base = prepare_batch, add_adapters

    def correct_latent(corrections: ModuleType) -> None:
        vars(corrections).update(apply_q_correction=add_to_queries, apply_v_correction=add_to_values)

    when_imported("sglang.srt.lora.layers", _unpin)
    when_imported("sglang.srt.lora.layers", _widen)
    when_imported("sglang.srt.lora.backend.torch_backend", multiply)
    when_imported("sglang.srt.lora.deepseek_mla_correction", correct_latent)


def _unpin(layers: ModuleType) -> None:
    def tensor(values: object, *, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    vars(layers)["torch"] = unpinned = ModuleType("torch")
    vars(unpinned).update(__getattr__=lambda name: getattr(torch, name), tensor=tensor)
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def prepare_batch(
    backend: TorchNativeLoRABackend,
    batch: ForwardBatch,
    slots: Sequence[int],
    ranks: Sequence[int],
    scales: Sequence[float],
    *_: object,
    **__: object,
) -> None:
    """Note which tokens of a batch have which adapter; `slots` of its requests, `ranks` and `scales` of all slots."""
    counts = [1] * len(slots) if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu or []
    segments, start = list[Segment](), 0
    for slot, group in groupby(zip(slots, counts, strict=False), key=lambda pair: pair[0]):
        rows = slice(start, start := start + sum(count for _, count in group))
        if ranks[slot]:
            segments.append(Segment(rows, slot, ranks[slot], scales[slot]))
    backend.batch_info = SimpleNamespace(segments=segments)


def add_adapters(
    backend: TorchNativeLoRABackend,
    layer: torch.nn.Module,
    x: Tensor,
    base: Callable[[], Tensor],
    a: Tensor,
    b: Tensor,
    output_offset: object,
    offsets: Sequence[int],
    *,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    **_: object,
) -> Tensor:
    """Return the layer's output for x [S, in]: base() + scale · B A x, of each part of a joined weight for itself.

    a  [slots, parts · rank, in]     b  [slots, out, rank]     offsets  of the parts in `out`
    """
    out = base()
    for rows, slot, rank, scale in backend.batch_info.segments:
        low = x[rows] @ a[slot, : rank * (len(offsets) - 1)].T
        part = out[rows]
        for number, (start, end) in enumerate(pairwise(offsets)):
            up = b[slot, start:end, :rank].T
            part[:, start:end].addmm_(low[:, number * rank : (number + 1) * rank], up, alpha=scale)
    return out if all_reduce is None else all_reduce(out)


def _widen(layers: ModuleType) -> None:
    rows, columns = layers.MergedColumnParallelLinearWithLoRA, layers.RowParallelLinearWithLoRA
    slice_rows, slice_columns = rows.slice_lora_b_weights, columns.slice_lora_a_weights

    def slice_lora_b_weights(self: MergedColumnParallelLinearWithLoRA, b: Tensor) -> Tensor:
        """Return this rank's part of B [sum of output sizes, rank]."""
        sizes = self.base_layer.output_sizes
        if (missing := sum(sizes) - b.size(0)) > 0 and not missing % len(sizes) and len(set(sizes)) == 1:
            b = torch.cat([pad(part, (0, 0, 0, missing // len(sizes))) for part in b.chunk(len(sizes))])
        part: Tensor = slice_rows(self, b)
        return part

    def slice_lora_a_weights(self: RowParallelLinearWithLoRA, a: Tensor) -> Tensor:
        """Return this rank's part of A [rank, in]."""
        part: Tensor = slice_columns(self, pad(a, (0, max(0, self.base_layer.input_size - a.size(1)))))
        return part

    rows.slice_lora_b_weights, columns.slice_lora_a_weights = slice_lora_b_weights, slice_lora_a_weights


def add_to_queries(attention: DeepseekV2AttentionMLA, queries: Tensor, out: Tensor) -> Tensor:
    """Add queries [S, H, k] · scale · B_k A to `out` [S, H, latent], what they are in the latent space."""
    for rows, a, b, scale in _latent_parts(attention):
        out[rows] += scale * torch.einsum("shk,hkr,rl->shl", queries[rows], b[:, : queries.size(-1)], a)
    return out


def add_to_values(attention: DeepseekV2AttentionMLA, attended: Tensor, out: Tensor) -> Tensor:
    """Add attended [S, H, latent] · scale · (B_v A)ᵀ to `out` [S, H · v]."""
    size = attention.v_head_dim
    for rows, a, b, scale in _latent_parts(attention):
        values = torch.einsum("shl,rl,hvr->shv", attended[rows], a, b[:, -size:])
        out.view(-1, attention.num_local_heads, size)[rows] += scale * values
    return out


def _latent_parts(attention: DeepseekV2AttentionMLA) -> Iterator[tuple[slice, Tensor, Tensor, float]]:
    """Yield (its tokens, A [r, latent], B [H, k + v, r], scale) of each adapter of a batch."""
    module = attention.kv_b_proj
    for rows, slot, rank, scale in module.lora_backend.batch_info.segments:
        b = module.B_buffer[slot, :, :rank].unflatten(0, (attention.num_local_heads, -1))
        yield rows, module.A_buffer[slot, :rank], b, scale
