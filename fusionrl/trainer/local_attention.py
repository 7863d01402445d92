"""Causal attention over packed sequences for machines without Transformer Engine, on a CPU or a GPU.

By torch's scaled_dot_product_attention, or on a CPU by our own kernel (`row_functions.py`): Megatron-core's own has
no context parallelism, no packed sequences, and memory quadratic in their length.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from fusionrl.trainer.packed_row import Bucket, PackedLayout, Places, whole_row, zigzag_positions


def _padded(x: Tensor, places: Places, count: int) -> Tensor:
    """Packed [t, heads, d] → [count, heads, length, d]: the tokens at these places, rows padded on the right."""
    if places.sources is not None:
        x = x.index_select(0, places.sources)
    if places.cells is not None:
        x = x.new_zeros(count * places.length, *x.shape[1:]).index_copy(0, places.cells, x)
    return x.view(count, places.length, *x.shape[1:]).transpose(1, 2)


def _mask(layout: PackedLayout, number: int, window: int | None, query: Tensor) -> Tensor:
    """Return the mask of a bucket, [queries' length, rows' length], added to scores: -inf where a query sees no key."""
    key = number, window
    if key not in layout.masks:
        bucket = layout.buckets[number]
        asking, length = bucket.queries.length, bucket.rows.length
        back = torch.arange(length - asking, length)[:, None] - torch.arange(length)
        hidden = (back < 0) | (back >= (length if window is None else window))
        kept = torch.bfloat16 if query.dtype is torch.bfloat16 and query.is_cuda else torch.float32
        layout.masks[key] = torch.zeros(asking, length).masked_fill(hidden, -torch.inf).to(query.device, kept)
    return layout.masks[key]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One more key, which gives every query the score of its head [heads], and has a value of zeros.

    Heads get eight numbers more, as kernels like it. Two of them hold the score, for which one of bf16 has too few
    digits.
    """
    (count, *_), size = query.shape, query.size(-1)
    high = scores.to(query.dtype)
    numbers = torch.stack([high, (scores - high.float()).to(query.dtype)], -1)  # [heads, 2]
    sink = F.pad(numbers, (size, 6))[None, :, None].expand(count, -1, -1, -1)
    query, key = F.pad(query, (0, 8), value=1.0), torch.cat([sink, F.pad(key, (0, 8))], 2)
    return query, key, F.pad(value, (0, size + 8 - value.size(-1), 1, 0)), F.pad(mask, (1, 0))


class DividedRows(MegatronModule):
    """A module of whose own parameters each tensor-parallel rank has some rows."""

    tp: torch.distributed.ProcessGroup

    def add_rows(self, name: str, *sizes: int, dtype: torch.dtype | None = None) -> None:
        """Add a parameter of these sizes on this rank; the gradient norm counts the rows of all ranks."""
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        rows = torch.nn.Parameter(torch.empty(sizes, dtype=dtype or self.config.params_dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(rows, True, 0, 1)
        setattr(self, name, rows)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the state of a checkpoint; the modules in it answer for themselves."""
        own = dict(self.named_parameters(recurse=False))
        state: dict[str, object] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            child = f"{prefix}{name}."
            state |= sharded_state_dict_default(module, child, sharded_offsets, metadata, tp_group=self.tp)
        return state


class SDPACoreAttention(DividedRows):
    """Causal attention over packed sequences, with grouped queries and zig-zag context parallelism.

    Context parallelism gathers keys and values of all ranks (in backward: reduce-scatters their gradients).

    window     tokens that a token sees, itself included; None: all before it
    has_sinks  each head has a score that takes part in its softmax without a value: `softmax_offset`, Megatron's name
    own_scale  of scores, where layers have different ones
    """

    window: ClassVar[int | None] = None
    has_sinks: ClassVar[bool] = False
    own_scale: ClassVar[float | None] = None

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
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp, self.cp_group = groups.tp, groups.cp
        scale = softmax_scale if self.own_scale is None else self.own_scale
        self.scale = scale if scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_offset: torch.nn.Parameter | None = None
        if self.has_sinks:
            heads = config.num_attention_heads // groups.tp.size()
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))

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
            assert self.window is None and not self.has_sinks, "refused by the kind"
            return self._context_parallel(query, key, value, layout)
        drops = self.training and self.dropout > 0
        if layout.table is not None and not drops:  # on a CPU only
            from fusionrl.cpu import kernels, row_functions

            if kernels.fit(query, key, value):
                options = (layout.table, self.scale, self.window, self.softmax_offset)
                return row_functions.attend(query, key, value, *options).flatten(1)
        out: Tensor | None = None
        for number, bucket in enumerate(layout.buckets):
            mask = bucket.mask
            if self.window is not None or self.has_sinks:
                mask = _mask(layout, number, self.window, query)
            results = self._bucket(query, key, value, bucket, mask)
            if bucket.targets is None:
                out = results
            else:
                out = value.new_zeros(query.size(0), *results.shape[1:]) if out is None else out
                out = out.index_copy(0, bucket.targets, results)
        if out is None:  # samples without a token: padding alone, whose gradients are 0
            out = value[:, :1].expand(-1, query.size(1), -1) * 0 + (query.sum() + key.sum()) * 0
        return out.reshape(query.size(0), -1)

    def _bucket(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, mask: Tensor | None) -> Tensor:
        padded = (
            _padded(query, bucket.queries, bucket.count),
            _padded(key, bucket.rows, bucket.count),
            _padded(value, bucket.rows, bucket.count),
        )
        out = self._attend(*padded, mask).transpose(1, 2)  # [count, length, heads, d]
        out = out.reshape(-1, *out.shape[2:])
        return out if bucket.outputs is None else out.index_select(0, bucket.outputs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.dtype is torch.bfloat16 and query.device.type == "cpu":
            # torch's CPU kernel is several times slower in bf16, above all backward.
            return self._attend(query.float(), key.float(), value.float(), mask).to(query.dtype)
        repeat = query.size(1) // key.size(1)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        size = value.size(-1)
        if self.softmax_offset is not None:
            assert mask is not None
            query, key, value, mask = _with_sinks(query, key, value, mask, self.softmax_offset.float() / self.scale)
        dropout = self.dropout if self.training else 0.0
        is_forked = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_forked else nullcontext():
            out = F.scaled_dot_product_attention(query, key, value, mask, dropout, mask is None, scale=self.scale)
        return out[..., :size]

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
