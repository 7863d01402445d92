"""Layer spec for machines without Transformer Engine: an RMSNorm and a core attention, on a CPU or a GPU.

Megatron-core's own local spec has no norm for sequence parallelism, no context parallelism, no packed
sequences and an attention whose memory is quadratic. The two modules here have them, by torch's
scaled_dot_product_attention, or by our own kernel (`row_attention.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from fusionrl.base import cpu_wing
from fusionrl.trainer import megatron_versions
from fusionrl.trainer.attention_buckets import Bucket, Places
from fusionrl.trainer.local_mlp import LocalMLP

if TYPE_CHECKING:
    from fusionrl.cpu.kernels import RowTable


class LocalNorm(torch.nn.Module):
    """Builds an RMSNorm, torch's on a GPU, its weight marked for the gradient all-reduce of sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        assert config.normalization == "RMSNorm", config.normalization
        kind = torch.nn.RMSNorm
        if cpu_wing.lacks_cuda():
            from fusionrl.cpu.row_norm import RowNorm as kind
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


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


def zigzag_positions(lengths: list[int] | tuple[int, ...], cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the packed sequence that `cp_rank` holds, in its local order.

    Each sequence is cut into 2 * cp pieces, of which rank r holds the r-th and the r-th from the end, so that
    causal attention costs every rank the same. Every length must be a multiple of 2 * cp_size, for cp_size >
    1.
    """
    start, pieces = 0, [torch.zeros(0, dtype=torch.long)]
    for length in lengths:
        if cp_size == 1:
            pieces.append(torch.arange(start, start + length))
        else:
            assert length % (2 * cp_size) == 0, f"length {length} is not a multiple of {2 * cp_size}"
            piece = length // (2 * cp_size)
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
                pieces.append(torch.arange(start + index * piece, start + (index + 1) * piece))
        start += length
    return torch.cat(pieces)


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
        causal = mask is None
        if dropout > 0 and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=self.scale)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=self.scale)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        order = torch.cat([zigzag_positions(layout.lengths, size, r) for r in range(size)])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        inverse = inverse.to(query.device)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), True, self.cp_group).index_select(0, inverse)
            for x in (key, value)
        )
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


class _OutputNorm(MegatronModule):
    """Before a Megatron module: its output is normalised before it is added to the residual (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Run the module, and normalise the first tensor that it returns, [s, b, h]."""
        output, bias = super().forward(*args, **kwargs)
        return self.output_norm(output), bias


class NormedSelfAttention(_OutputNorm, SelfAttention):
    """Self-attention with a norm of its output."""


class NormedMLP(_OutputNorm, LocalMLP):
    """An MLP with a norm of its output."""


def add_output_norms(block: TransformerBlockSubmodules) -> None:
    """Give every layer of a spec norms after attention and after the MLP."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = NormedSelfAttention
        megatron_versions.set_mlp_module(layer.submodules, NormedMLP)


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
