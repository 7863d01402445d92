"""The class behind `ATTENTION_BACKEND`; importing it imports SGLang's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from fusionrl.cpu import kernels
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

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plans, self._planned = {}, forward_batch

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [requests, heads * size] of the newest tokens → the same shape, with the values' size."""
        if not self._is_ours(layer, forward_batch):
            assert sinks is None, "no model has sinks in such layers"
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [tokens, heads * size] of several new tokens a request → the same shape, with the values' size."""
        if forward_batch.forward_mode.is_target_verify():
            return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        if not self._is_ours(layer, forward_batch) or layer.attn_type is AttentionType.ENCODER_ONLY:
            assert sinks is None, "no model has sinks in such layers"
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    @staticmethod
    def _is_ours(layer: RadixAttention, batch: ForwardBatch) -> bool:
        return not layer.is_cross_attention and batch.encoder_lens is None and batch.spec_info is None

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if batch.forward_mode.is_decode() and self._is_for_kernel(query, keys, values, batch):
            window = layer.sliding_window_size
            out = kernels.attend_decode(
                *(query, keys, values, self.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens),
                scale=layer.scaling,
                window=window if window is not None and window > -1 else None,
                sinks=None if sinks is None else sinks.float().contiguous(),
            )
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        row_bytes = max(keys[0].numel(), values[0].numel()) * query.element_size()
        plan = self._plan(layer, batch, query.dtype, row_bytes)
        out = attend(plan, query, keys, values, scale=layer.scaling, sinks=sinks)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _is_for_kernel(self, query: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch) -> bool:
        table, rows, lengths = self.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens
        types = (table.dtype, rows.dtype, lengths.dtype)
        is_dense = all(tensor.is_contiguous() for tensor in (keys, values[0], table, rows, lengths))
        is_shared = keys.size(2) == query.size(2) and query.size(1) % keys.size(1) == 0
        is_typed = types == (torch.int32, torch.int64, torch.int64)
        return is_typed and is_dense and is_shared and kernels.fit(query, keys, values)

    def _plan(self, layer: RadixAttention, batch: ForwardBatch, dtype: torch.dtype, row_bytes: int) -> AttentionPlan:
        """The calls of this forward pass, made for the first layer of each window."""
        if self._planned is not batch:  # a pass whose metadata were not made here
            self._plans, self._planned = {}, batch
        window = layer.sliding_window_size
        window = window if window is not None and window > -1 else None
        if window not in self._plans and batch.forward_mode.is_target_verify():
            self._plans[window] = plan_trees(
                self.req_to_token_pool.req_to_token,
                batch.req_pool_indices,
                batch.seq_lens,
                batch.spec_info.custom_mask,
                dtype=dtype,
                window=window,
            )
        if window not in self._plans:
            totals = batch.seq_lens.tolist()
            news = [1] * len(totals) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
            prefixes = [total - new for total, new in zip(totals, news, strict=True)]
            self._plans[window] = plan_attention(
                self.req_to_token_pool.req_to_token,
                batch.req_pool_indices,
                prefixes,
                news,
                dtype=dtype,
                row_bytes=row_bytes,
                window=window,
            )
        return self._plans[window]
