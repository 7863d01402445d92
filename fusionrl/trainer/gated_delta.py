"""Gated delta nets over packed sequences, divided by heads over tensor- and context-parallel ranks.

Megatron-core's own needs a package of GPU kernels to be built at all, and before 0.18 has no packed sequences and no
context parallelism. Here parameters are grouped by heads of keys: a tensor-parallel rank holds a run of rows of each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from fusionrl.models.kinds import Delta
from fusionrl.models.kinds.delta import CHUNK
from fusionrl.trainer.local_attention import DividedRows
from fusionrl.trainer.local_layers import PlainNorm
from fusionrl.trainer.packed_row import PackedLayout, zigzag_positions


class GatedSelfAttention(SelfAttention):
    """Self-attention with a gate, whose rows follow those of each query head as in checkpoints.

    Megatron's own has the gates of a query group behind all its queries.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """[t, 1, h] → query [t, 1, heads, d], key and value [t, 1, groups, d], gate [t, 1, heads * d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, d = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        count = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(*mixed.shape[:-1], groups, 2 * count + 2, d)
        both, key, value = mixed.split([2 * count, 1, 1], dim=3)
        both = both.reshape(*both.shape[:2], groups * count, 2, d)
        query, gate, key, value = both[..., 0, :], both[..., 1, :], key[..., 0, :], value[..., 0, :]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query.contiguous())
        if self.k_layernorm is not None:
            key = self.k_layernorm(key.contiguous())
        return query, key, value, gate.flatten(2)


@dataclass(frozen=True)
class Chunks:
    """The places of the tokens of packed sequences in chunks, those of all sequences' first chunks before all second.

    size       tokens of a chunk
    cells      [T] place of each token
    counts     for each step, how many sequences have so many chunks: the longest stand first
    positions  [T] of each token in its sequence
    """

    size: int
    cells: Tensor
    counts: tuple[int, ...]
    positions: Tensor

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Chunks:
        """The chunks of sequences that stand one after the other."""
        size = min(CHUNK, 1 << max(max(lengths) - 1, 0).bit_length())
        numbers = torch.tensor([-(-length // size) for length in lengths])
        order = numbers.argsort(descending=True, stable=True)
        place = order.argsort()  # of each sequence among those of a step
        counts = tuple(int((numbers > step).sum()) for step in range(int(numbers.max())))
        starts = torch.tensor([0, *counts]).cumsum(0)
        cells, positions = [], []
        for length, at in zip(lengths, place.tolist(), strict=True):
            position = torch.arange(length)
            cells.append((starts[position // size] + at) * size + position % size)
            positions.append(position)
        return cls(size, torch.cat(cells).to(device), counts, torch.cat(positions).to(device))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Run the gated delta rule over each sequence from a zero state, in chunks (arXiv:2406.06484, section 3), in fp32.

    Each token scales the state by its decay, and brings the value that the state gives for its key nearer to its own,
    by a share of `beta`; it then reads the state by its query.

    Args:
        query, key: [T, heads, K], of length 1; queries are scaled here
        value: [T, heads, V]
        decay: [T, heads], the logarithm of the factor
        beta: [T, heads]

    Returns:
        [T, heads, V]
    """
    size, total = chunks.size, sum(chunks.counts)

    def in_chunks(x: Tensor) -> Tensor:  # [T, heads, ...] → [chunks, heads, size, ...]
        cells = x.new_zeros(total * size, *x.shape[1:]).index_copy(0, chunks.cells, x)
        return cells.view(total, size, *x.shape[1:]).transpose(1, 2)

    query, key, value, decay, beta = (in_chunks(x) for x in (query * key.size(-1) ** -0.5, key, value, decay, beta))
    # Since the chunk's begin. Differences of sums in fp32 would be off by 4e-6 where a head forgets quickly.
    passed = decay.double().cumsum(-1)
    is_later = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    between = (passed[..., :, None] - passed[..., None, :]).float().masked_fill(~is_later, float("-inf")).exp()
    weighted, faded = key * beta[..., None], passed.float().exp()[..., None]
    # A token's update sees those before it: (1 + the strictly lower part) updates = values, less what the state gives.
    inner = ((weighted @ key.mT) * between).tril(-1)
    sides = torch.cat([value * beta[..., None], weighted * faded], -1)
    solved = torch.linalg.solve_triangular(inner, sides, upper=False, unitriangular=True)
    updates, carried = solved.split([value.size(-1), key.size(-1)], dim=-1)
    scores, query = (query @ key.mT) * between, query * faded
    left = key * (passed[..., -1:] - passed).float().exp()[..., None]
    factors = passed[..., -1].float().exp()[..., None, None]
    state = value.new_zeros(chunks.counts[0], value.size(1), key.size(-1), value.size(-1))
    outs, start = [], 0
    for count in chunks.counts:
        at = slice(start, start + count)
        state, start = state[:count], start + count
        fresh = updates[at] - carried[at] @ state
        outs.append(query[at] @ state + scores[at] @ fresh)
        state = state * factors[at] + left[at].mT @ fresh
    return torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.cells)


def convolve(rows: Tensor, kernel: Tensor, chunks: Chunks) -> Tensor:
    """SiLU of a causal convolution of each channel by itself, which begins anew with each sequence.

    Args:
        rows: [T, channels]
        kernel: [channels, tokens], the last for the token itself
        chunks: of the sequences

    Returns:
        [T, channels] fp32
    """
    # As many zeros before each sequence as tokens that its first one would see.
    num_zeros, numbers = kernel.size(1) - 1, (chunks.positions == 0).cumsum(0)
    places = torch.arange(len(rows), device=rows.device) + numbers * num_zeros
    # Each sequence that has a token has a first chunk: the host knows the size, and no layer waits for the device.
    size = len(rows) + chunks.counts[0] * num_zeros
    out: Tensor = _Convolution.apply(rows.float(), kernel.float(), places, size)
    return F.silu(out)


class _Convolution(torch.autograd.Function):
    """Products that are added in their place: half of the time of separate ones, and a row is kept once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kernel: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows, kernel, places)
        ctx.size = size
        spread = _spread(rows, places, size)
        out = spread * kernel[:, -1]
        for back in range(1, kernel.size(1)):
            out[back:].addcmul_(spread[:-back], kernel[:, -1 - back])
        return out.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, kernel, places = ctx.saved_tensors
        rows, grad = _spread(rows, places, ctx.size), _spread(grad, places, ctx.size)
        of_rows, of_kernel = grad * kernel[:, -1], torch.empty_like(kernel)
        of_kernel[:, -1] = (grad * rows).sum(0)
        for back in range(1, kernel.size(1)):
            of_rows[:-back].addcmul_(grad[back:], kernel[:, -1 - back])
            of_kernel[:, -1 - back] = (grad[back:] * rows[:-back]).sum(0)
        return of_rows.index_select(0, places), of_kernel, None, None


def _spread(rows: Tensor, places: Tensor, size: int) -> Tensor:
    return rows.new_zeros(size, rows.size(1)).index_copy_(0, places, rows)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@lru_cache(maxsize=1)
def _has_kernels() -> bool:
    return importlib.util.find_spec("fla") is not None


class GatedDelta(DividedRows):
    """A gated delta net in place of a layer's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        kind: Delta,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp, self.cp, self.kind, self.layer_number = groups.tp, groups.cp, kind, layer_number
        size = self.tp.size()
        self.heads = kind.key_heads // size  # of keys, on this rank
        common = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, kind.width, gather_output=False, skip_bias_add=False, is_expert=False, **common
        )
        self.out_proj = RowParallelLinear(
            kind.value_heads * kind.value_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            **common,
        )
        self.add_rows("conv_weight", kind.channels // size, 1, kind.conv_size)
        self.add_rows("dt_bias", kind.value_heads // size)
        self.add_rows("A_log", kind.value_heads // size, dtype=torch.float32)
        self.out_norm = PlainNorm(config, kind.value_dim, config.layernorm_epsilon)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDelta:
        """As torch's, but that Megatron's conversion of a model to bf16 leaves `A_log` in fp32."""
        exact = self.A_log.data
        super()._apply(fn, recurse)
        self.A_log.data = exact.to(self.A_log.device)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """[t, 1, h] of this rank → the same shape, and no bias."""
        assert isinstance(packed_seq_params, PackedLayout), "packed sequences only"
        kind, lengths = self.kind, packed_seq_params.lengths
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed[:, 0].view(mixed.size(0), self.heads, -1)
        heads, first = self.heads // self.cp.size(), 0
        if self.cp.size() > 1:
            mixed, first = _all_tokens(mixed, lengths, self.cp), self.cp.rank() * heads
        mine = slice(first, first + heads)
        values = kind.ratio * kind.value_dim
        parts = [2 * kind.key_dim + values, values, kind.ratio, kind.ratio]
        qkv, z, b, a = mixed.split(parts, dim=-1)
        bias, rate = (x.view(self.heads, -1)[mine].float() for x in (self.dt_bias, self.A_log))
        decay = (-rate.exp() * F.softplus(a.float() + bias)).flatten(1)
        kernel = self.conv_weight.view(self.heads, -1, kind.conv_size)[mine].flatten(0, 1)
        chunks = Chunks.of(lengths, mixed.device)
        rows = convolve(qkv.flatten(1), kernel, chunks).view(-1, heads, parts[0])
        query, key, value = rows.split([kind.key_dim, kind.key_dim, values], dim=-1)
        query, key = (_unit(x).repeat_interleave(kind.ratio, 1) for x in (query, key))
        value = value.reshape(-1, heads * kind.ratio, kind.value_dim)
        beta = b.float().sigmoid().flatten(1)
        if value.is_cuda and z.dtype is not torch.float32 and _has_kernels():  # which refuse fp32
            out = by_kernels(query.to(z.dtype), key.to(z.dtype), value.to(z.dtype), decay, beta, lengths)
        else:
            out = delta_rule(query, key, value, decay, beta, chunks).to(z.dtype)
        out = self.out_norm(out) * F.silu(z.reshape(out.shape).float()).to(z.dtype)
        out = out.flatten(1)
        if self.cp.size() > 1:
            out = _some_tokens(out, lengths, self.cp)
        return self.out_proj(out[:, None].contiguous())


@lru_cache(maxsize=4)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where sequences begin, and the last one ends: one tensor for all layers, as FLA keeps tables for those it
    knows. It leaves empty sequences out, which some versions of FLA do not count."""
    return torch.tensor([0, *filter(None, lengths)]).cumsum(0, dtype=torch.int32).to(device)


def by_kernels(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """`delta_rule` by the kernels of flash-linear-attention, on a GPU; the result has the type of `value`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    offsets = _offsets(lengths, value.device)
    out, _ = chunk_gated_delta_rule(
        *(x[None] for x in (query, key, value)), g=decay[None], beta=beta[None], cu_seqlens=offsets
    )
    return out[0]


def _places(lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Place in the packed row of each token of all ranks, one rank after the other."""
    return torch.cat([zigzag_positions(lengths, group.size(), rank) for rank in range(group.size())]).to(device)


def _all_tokens(mixed: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[t, heads, d] of a rank's tokens → [T, heads / size, d] of all tokens in the packed row's order."""
    size, (count, heads, width) = group.size(), mixed.shape
    sent = mixed.view(count, size, heads // size * width).transpose(0, 1).reshape(size * count, -1)
    received = all_to_all(group, sent.contiguous())
    inverse = _places(lengths, group, mixed.device).argsort()
    return received.index_select(0, inverse).view(-1, heads // size, width)


def _some_tokens(out: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[T, d] of some heads → [t, size * d] of all heads, for this rank's tokens."""
    size = group.size()
    received = all_to_all(group, out.index_select(0, _places(lengths, group, out.device)).contiguous())
    return received.view(size, -1, out.size(1)).transpose(0, 1).flatten(1)
