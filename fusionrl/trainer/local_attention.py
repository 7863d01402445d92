"""Causal attention over packed sequences for machines without Transformer Engine, on a CPU or a GPU.

By torch's scaled_dot_product_attention, or on a CPU by our own kernel (`row_attention.py`): Megatron-core's own has
no context parallelism, no packed sequences, and memory quadratic in their length.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from fusionrl.trainer.attention_buckets import Bucket, Places
from fusionrl.trainer.context_parallel import whole_row, zigzag_positions

if TYPE_CHECKING:
    from fusionrl.cpu.kernels import RowTable


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of packed sequences, with more that the modules here need; built once per batch.

    lengths    padded length of each sequence over all context-parallel ranks
    buckets    attention calls of the batch; unused under context parallelism
    table      the same sequences for our own kernel, where that is for them
    positions  [T] of each packed token in its sequence, where sequences share tokens and so do not stand one
               after the other; then Megatron sees one sequence, and rotary embeddings are taken by these
    """

    lengths: tuple[int, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    table: RowTable | None = None
    positions: Tensor | None = None


def _padded(x: Tensor, places: Places, count: int) -> Tensor:
    """Packed [t, heads, d] → [count, heads, length, d]: the tokens at these places, rows padded on the right."""
    if places.sources is not None:
        x = x.index_select(0, places.sources)
    if places.cells is not None:
        x = x.new_zeros(count * places.length, *x.shape[1:]).index_copy(0, places.cells, x)
    return x.view(count, places.length, *x.shape[1:]).transpose(1, 2)


class SDPACoreAttention(MegatronModule):
    """Causal attention over packed sequences, with grouped queries and zig-zag context parallelism.

    Context parallelism gathers keys and values of all ranks (in backward: reduce-scatters their gradients).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        assert getattr(config, "softmax_type", "vanilla") == "vanilla"
        assert config.window_size is None
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """query [t, heads, d], key [t, groups, d], value [t, groups, dv] of this rank's tokens -> [t, heads * dv]."""
        assert attention_bias is None
        assert isinstance(packed_seq_params, PackedLayout), "packed sequences only"
        layout = packed_seq_params
        if self.cp_group is not None and self.cp_group.size() > 1:
            return self._context_parallel(query, key, value, layout)
        drops = self.training and self.dropout > 0
        if layout.table is not None and not drops:  # on a CPU only
            from fusionrl.cpu import kernels, row_attention

            if kernels.fit(query, key, value):
                return row_attention.attend(query, key, value, layout.table, self.scale).flatten(1)
        out: Tensor | None = None
        for bucket in layout.buckets:
            results = self._bucket(query, key, value, bucket)
            if bucket.targets is None:
                out = results
            else:
                out = value.new_zeros(query.size(0), *results.shape[1:]) if out is None else out
                out = out.index_copy(0, bucket.targets, results)
        if out is None:  # samples without a token: padding alone, whose gradients are 0
            out = value[:, :1].expand(-1, query.size(1), -1) * 0 + (query.sum() + key.sum()) * 0
        return out.reshape(query.size(0), -1)

    def _bucket(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        padded = (
            _padded(query, bucket.queries, bucket.count),
            _padded(key, bucket.rows, bucket.count),
            _padded(value, bucket.rows, bucket.count),
        )
        out = self._attend(*padded, bucket.mask).transpose(1, 2)  # [count, length, heads, d]
        out = out.reshape(-1, *out.shape[2:])
        return out if bucket.outputs is None else out.index_select(0, bucket.outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.dtype is torch.bfloat16 and query.device.type == "cpu":
            # torch's CPU kernel is several times slower in bf16, above all backward.
            return self._attend(query.float(), key.float(), value.float(), mask).to(query.dtype)
        repeat = query.size(1) // key.size(1)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        dropout = self.dropout if self.training else 0.0
        is_forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_forked else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, mask is None, scale=self.scale)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        key, value = (whole_row(x, layout.lengths, self.cp_group) for x in (key, value))
        out, local, start = [], 0, 0
        for length in layout.lengths:
            num_local = length // size
            positions = zigzag_positions([length], size, rank)
            mask = (positions[:, None] >= torch.arange(length)[None, :]).to(query.device)
            q = query[local : local + num_local].transpose(0, 1)[None]
            k, v = (x[start : start + length].transpose(0, 1)[None] for x in (key, value))
            out.append(self._attend(q, k, v, mask)[0].transpose(0, 1))
            local, start = local + num_local, start + length
        return torch.cat(out).reshape(query.size(0), -1)
