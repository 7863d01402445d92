"""Adapters (LoRA) in SGLang engines on a CPU: its backend `torch_native`, with what it takes for granted of a GPU.

* There is no pinned memory without a GPU.
* SGLang widens the MLP of an engine with several ranks to a multiple of 32 on each, but not what is multiplied with it
  in an adapter; a rank's part is then cut out in the wrong place. Zeros widen the adapter as the weights.
* Latent attention multiplies with its `kv_b_proj` in two halves, whose adapter is added by kernels for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusionrl.base.lazy_modules import when_imported

_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


def register() -> None:
    """Let schedulers of this process, and of those forked from it, serve adapters; call it once."""
    for name in _MODULES:
        when_imported(name, _unpin)
    when_imported("sglang.srt.lora.layers", _widen)
    when_imported("sglang.srt.lora.deepseek_mla_correction", _correct_latent)
    torch.Tensor.pin_memory = lambda self, *_, **__: self


class _WithoutPins(ModuleType):
    """Torch as a module of SGLang sees it."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.tensor(*args, **options)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*args, **options)


def _unpin(module: ModuleType) -> None:
    vars(module)["torch"] = _WithoutPins()


def _widen(layers: ModuleType) -> None:
    rows, columns = layers.MergedColumnParallelLinearWithLoRA, layers.RowParallelLinearWithLoRA
    slice_rows, slice_columns = rows.slice_lora_b_weights, columns.slice_lora_a_weights

    def slice_lora_b_weights(self: Any, b: Tensor) -> Tensor:  # [sum of output sizes, rank]
        sizes = self.base_layer.output_sizes
        if (missing := sum(sizes) - b.size(0)) > 0 and not missing % len(sizes) and len(set(sizes)) == 1:
            b = torch.cat([pad(part, (0, 0, 0, missing // len(sizes))) for part in b.chunk(len(sizes))])
        part: Tensor = slice_rows(self, b)
        return part

    def slice_lora_a_weights(self: Any, a: Tensor) -> Tensor:  # [rank, input size]
        part: Tensor = slice_columns(self, pad(a, (0, max(0, self.base_layer.input_size - a.size(1)))))
        return part

    rows.slice_lora_b_weights, columns.slice_lora_a_weights = slice_lora_b_weights, slice_lora_a_weights


def _correct_latent(corrections: ModuleType) -> None:
    vars(corrections).update(apply_q_correction=add_to_queries, apply_v_correction=add_to_values)


def add_to_queries(attention: Any, queries: Tensor, out: Tensor) -> Tensor:
    """Add queries [S, H, k] · scale · B_k A to `out` [S, H, latent], what they are in the latent space."""
    for rows, a, b, scale in _segments(attention):
        out[rows] += scale * torch.einsum("shk,hkr,rl->shl", queries[rows], b[:, : queries.size(-1)], a)
    return out


def add_to_values(attention: Any, attended: Tensor, out: Tensor) -> Tensor:
    """Add attended [S, H, latent] · scale · (B_v A)ᵀ to `out` [S, H · v]."""
    size = attention.v_head_dim
    for rows, a, b, scale in _segments(attention):
        values = torch.einsum("shl,rl,hvr->shv", attended[rows], a, b[:, -size:])
        out.view(-1, attention.num_local_heads, size)[rows] += scale * values
    return out


def _segments(attention: Any) -> Iterator[tuple[slice, Tensor, Tensor, float]]:
    """Yield (its tokens, A [r, latent], B [H, k + v, r], scale) of each adapter of a batch."""
    module, start = attention.kv_b_proj, 0
    batch = module.lora_backend.batch_info
    if not module.set_lora or batch is None:
        return
    for slot, count in zip(batch.weight_indices_cpu.tolist(), batch.seg_lens_cpu.tolist(), strict=True):
        rows, start = slice(start, start + count), start + count
        if rank := int(batch.lora_ranks_cpu[slot]):
            b = module.B_buffer[slot, :, :rank].unflatten(0, (attention.num_local_heads, -1))
            yield rows, module.A_buffer[slot, :rank], b, float(batch.scalings_cpu[slot])
