"""The class behind `ATTENTION_BACKEND`; importing it imports SGLang's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from fusionrl.cpu import bitwise, kernels
from fusionrl.cpu.batched_attention import AttentionPlan, attend, plan_attention, plan_trees

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor


class BatchedAttentionBackend(TorchNativeAttnBackend):
    """SGLang's torch attention backend, computed for all requests of a batch at once."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._plans: dict[int | None, AttentionPlan] = {}
        self._planned: ForwardBatch | None = None
        self._of_tokens: tuple[Tensor, Tensor] | None = None  # of this pass, the same for each layer

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._begin(forward_batch)

    def _begin(self, batch: ForwardBatch) -> None:
        self._plans, self._of_tokens, self._planned = {}, None, batch

    def forward_decode(self, *args: object, **kwargs: object) -> Tensor:
        """q [requests, heads * size] of the newest tokens → the same shape, with the values' size."""
        return self._forward(super().forward_decode, *args, **kwargs)  # type: ignore[arg-type]

    def forward_extend(self, *args: object, **kwargs: object) -> Tensor:
        """q [tokens, heads * size] of several new tokens a request → the same shape, with the values' size."""
        return self._forward(super().forward_extend, *args, **kwargs)  # type: ignore[arg-type]

    def _forward(
        self,
        usual: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch, mode, pool = forward_batch, forward_batch.forward_mode, self.token_to_kv_pool
        is_other = layer.is_cross_attention or batch.encoder_lens is not None or batch.spec_info is not None
        is_encoder = not mode.is_decode() and layer.attn_type is AttentionType.ENCODER_ONLY
        if (is_other or is_encoder) and not mode.is_target_verify():
            assert sinks is None, "no model has sinks in such layers"
            return usual(q, k, v, layer, batch, save_kv_cache)
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        rows, lengths = self._rows_and_lengths(batch, query.dtype)
        if rows is not None and self._is_for_kernel(query, keys, values, rows, lengths):
            out = kernels.attend_decode(
                *(query, keys, values, self.req_to_token_pool.req_to_token, rows, lengths),
                scale=layer.scaling,
                window=_window(layer),
                sinks=None if sinks is None else sinks.float().contiguous(),
            )
        else:
            row_bytes = max(keys[0].numel(), values[0].numel()) * query.element_size()
            plan = self._plan(_window(layer), batch, query.dtype, row_bytes)
            out = attend(plan, query, keys, values, scale=layer.scaling, sinks=sinks)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _rows_and_lengths(self, batch: ForwardBatch, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """(row in the table, number of tokens that it sees, itself included) [T] of each new token; (None, …): not for
        `attend_decode`.

        In fp32 each token of a prompt is attended as one of a decode step is. Then its bits do not depend on the batch,
        nor on what the cache holds of the prompt; short prompts take less time so, and one of 2,000 tokens twice as
        much. In bf16 they would depend on the products' rows all the same, but for --bitwise.
        """
        rows, totals = batch.req_pool_indices, batch.seq_lens
        if batch.forward_mode.is_decode():
            return rows, totals
        if not (dtype is torch.float32 or bitwise.is_on()) or batch.forward_mode.is_target_verify():
            return None, totals
        if self._planned is not batch:
            self._begin(batch)
        if self._of_tokens is None:
            news = batch.extend_seq_lens.to(torch.int64)
            ends = totals.repeat_interleave(news)
            until_end = news.cumsum(0).repeat_interleave(news) - torch.arange(len(ends))
            self._of_tokens = rows.repeat_interleave(news), ends - until_end + 1
        return self._of_tokens

    def _is_for_kernel(self, query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor) -> bool:
        table = self.req_to_token_pool.req_to_token
        types = (table.dtype, rows.dtype, lengths.dtype)
        is_dense = all(tensor.is_contiguous() for tensor in (keys, values[0], table, rows, lengths))
        is_shared = keys.size(2) == query.size(2) and query.size(1) % keys.size(1) == 0
        is_typed = types == (torch.int32, torch.int64, torch.int64)
        return is_typed and is_dense and is_shared and kernels.fit(query, keys, values)

    def _plan(self, window: int | None, batch: ForwardBatch, dtype: torch.dtype, row_bytes: int) -> AttentionPlan:
        """The calls of this forward pass, made for the first layer of each window."""
        if self._planned is not batch:  # a pass whose metadata were not made here
            self._begin(batch)
        table, rows = self.req_to_token_pool.req_to_token, batch.req_pool_indices
        if window not in self._plans and batch.forward_mode.is_target_verify():
            mask = batch.spec_info.custom_mask
            self._plans[window] = plan_trees(table, rows, batch.seq_lens, mask, dtype=dtype, window=window)
        if window not in self._plans:
            totals = batch.seq_lens.tolist()
            news = [1] * len(totals) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
            prefixes = [total - new for total, new in zip(totals, news, strict=True)]
            self._plans[window] = plan_attention(
                table, rows, prefixes, news, dtype=dtype, row_bytes=row_bytes, window=window
            )
        return self._plans[window]


def _window(layer: RadixAttention) -> int | None:
    """Tokens that a query of the layer sees before its own; None: all of them."""
    window = layer.sliding_window_size
    return window if window is not None and window > -1 else None
