"""Gated delta nets of engines on a CPU against transformers' own functions: prompts in parts, and tokens after them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionrl.cpu import delta_rule as ours
from fusionrl.cpu import kernels

H, HV, K, V, W = 2, 4, 12, 8, 4
CHANNELS = 2 * H * K + HV * V


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _inputs(random: torch.Generator, count: int) -> tuple[Tensor, ...]:
    """Queries and keys [T, H, K], values [T, HV, V], a and b [T, HV] of `count` tokens."""
    q, k = (torch.randn(count, H, K, generator=random) for _ in range(2))
    v = torch.randn(count, HV, V, generator=random)
    a, b = (torch.randn(count, HV, generator=random) for _ in range(2))
    return q, k, v, a, b


def _net(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias [HV]."""
    return torch.rand(HV, generator=random) - 0.5, torch.rand(HV, generator=random) - 0.5


def _reference(inputs: Sequence[Tensor], decay: Tensor, beta: Tensor, *, by_token: bool) -> tuple[Tensor, Tensor]:
    """([T, HV, V], state [HV, V, K]) by transformers, of one sequence from a state of zeros."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    name = "torch_recurrent_gated_delta_rule" if by_token else "torch_chunk_gated_delta_rule"
    q, k, v = inputs[:3]
    q, k = (x.repeat_interleave(HV // H, 1) for x in (q, k))
    out, state = getattr(theirs, name)(
        *(x[None] for x in (q, k, v, decay, beta)), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0].mT


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_sequence_is_that_of_transformers(count: int, by_token: bool, random: torch.Generator) -> None:
    inputs, net = _inputs(random, count), _net(random)
    decay, beta = (x[0] for x in ours.fused_gdn_gating_cpu(net[0], *inputs[3:], net[1]))
    wanted, wanted_state = _reference(inputs, decay, beta, by_token=by_token)
    out, state = ours.delta_rule(*inputs[:3], decay, beta, torch.zeros(HV, V, K))
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(state, wanted_state, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_prompts_in_parts_and_tokens_are_one_sequence(
    has_kernels: bool, random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of a batch, one in two parts, then tokens: the pool's states are those of the sequences whole."""
    assert kernels.loaded()
    if not has_kernels:
        monkeypatch.setattr(kernels, "fit", lambda *tensors: False)
    net, lengths, slots = _net(random), (70, 5, 9), torch.tensor([4, 1, 2], dtype=torch.int32)
    sequences = [_inputs(random, length + 2) for length in lengths]
    pool = torch.full((6, HV, V, K), torch.nan)
    pool[slots.long()] = 0.0
    outs: list[list[Tensor]] = [[], [], []]

    def prefill(parts: Sequence[tuple[int, int]]) -> None:
        rows = [tuple(x[a:b] for x in one) for one, (a, b) in zip(sequences, parts, strict=True)]
        q, k, v, a, b = (torch.cat(x)[None] for x in zip(*rows, strict=True))
        decay, beta = ours.fused_gdn_gating_cpu(net[0], a[0], b[0], net[1])
        starts = torch.tensor([0, *(b - a for a, b in parts)]).cumsum(0)
        out, *_ = ours.chunk_gated_delta_rule_cpu(q, k, v, decay, beta, pool, starts, False, True, slots)
        for kept, part in zip(outs, out[0].split([b - a for a, b in parts]), strict=True):
            kept.append(part)

    prefill([(0, 66), (0, 5), (0, 9)])
    prefill([(66, 70), (5, 5), (9, 9)])
    for step in range(2):
        rows = [[x[n + step] for x in one] for one, n in zip(sequences, lengths, strict=True)]
        q, k, v, a, b = (torch.stack(x) for x in zip(*rows, strict=True))
        out = ours.fused_sigmoid_gating_delta_rule_update_cpu(
            *(net[0], net[1], q[None], k[None], v[None], a, b, pool, slots, torch.arange(4), True, 1.0, 20.0)
        )
        for kept, token in zip(outs, out[0], strict=True):
            kept.append(token[None])
    for one, slot, kept in zip(sequences, slots.tolist(), outs, strict=True):
        decay, beta = (x[0] for x in ours.fused_gdn_gating_cpu(net[0], *one[3:], net[1]))
        wanted, state = _reference(one, decay, beta, by_token=True)
        torch.testing.assert_close(torch.cat(kept), wanted, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(pool[slot], state, atol=2e-6, rtol=2e-6)
    assert pool[[0, 3, 5]].isnan().all(), "no stranger's state is touched"


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, CHANNELS)])
def test_the_convolution_is_that_of_transformers(bias: Tensor | None, random: torch.Generator) -> None:
    """Requests of one token, of two parts, and shorter than the window; then a token of each."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    weight = torch.randn(CHANNELS, W, generator=random)
    lengths, slots = (1, 11, 2), torch.tensor([3, 0, 2], dtype=torch.int32)
    sequences = [torch.randn(CHANNELS, length + 1, generator=random) for length in lengths]
    wanted = [causal_conv1d_fn(x[None], weight, bias, "silu")[0] for x in sequences]
    states = torch.full((5, CHANNELS, W - 1), torch.nan)
    outs: list[list[Tensor]] = [[], [], []]
    parts = ((0, 1), (0, 6), (0, 2)), ((1, 1), (6, 11), (2, 2))
    for part, has_state in zip(parts, (False, True), strict=True):
        sizes = [b - a for a, b in part]
        x = torch.cat([one[:, a:b] for one, (a, b) in zip(sequences, part, strict=True)], 1)
        starts = torch.tensor([0, *sizes]).cumsum(0)
        out = ours.causal_conv1d_fn_cpu(
            *(x, weight, bias, "silu", states, torch.tensor([has_state] * 3), slots, starts), seq_lens_cpu=sizes
        )
        for kept, one in zip(outs, out.split(sizes, 1), strict=True):
            kept.append(one)
    tokens = torch.stack([one[:, -1] for one in sequences])
    last = ours.causal_conv1d_update_cpu(tokens, states, weight, bias, "silu", conv_state_indices=slots)
    for kept, token, one in zip(outs, last, wanted, strict=True):
        torch.testing.assert_close(torch.cat([*kept, token[:, None]], 1), one, atol=2e-6, rtol=2e-6)
    assert states[[1, 4]].isnan().all()


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, CHANNELS).bfloat16()])
def test_the_convolution_rounds_once(bias: Tensor | None, random: torch.Generator) -> None:
    """In bf16, of a prompt and of a newest token alike: trainers round once, too."""
    weight, row = (torch.randn(CHANNELS, size, generator=random).bfloat16() for size in (W, 20))
    exact = F.conv1d(F.pad(row.double(), (W - 1, 0)), weight.double()[:, None], groups=CHANNELS)
    wanted = F.silu(exact if bias is None else exact + bias.double()[:, None]).bfloat16()
    states, slots = torch.zeros(1, CHANNELS, W - 1).bfloat16(), torch.tensor([0])
    starts, fresh = torch.tensor([0, 19]), torch.tensor([False])
    found = ours.causal_conv1d_fn_cpu(row[:, :19], weight, bias, "silu", states, fresh, slots, starts)
    last = ours.causal_conv1d_update_cpu(row[:, 19][None], states, weight, bias, "silu", slots)[0]
    assert (torch.cat([found, last[:, None]], 1) != wanted).sum() <= 2  # halfway between two values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_gates_are_those_of_transformers(dtype: torch.dtype, random: torch.Generator) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

    heads, size, eps = 3, 16, 1e-6
    q_norm, k_norm = Qwen3_5RMSNorm(size, eps).to(dtype), Qwen3_5RMSNorm(size, eps).to(dtype)
    gated = Qwen3_5RMSNormGated(size, eps).to(dtype)
    with torch.no_grad():
        for norm in (q_norm, k_norm, gated):
            norm.weight.copy_(torch.randn(size, generator=random))
    q_gate = torch.randn(5, heads * 2 * size, generator=random).to(dtype)
    k = torch.randn(5, 2 * size, generator=random).to(dtype)
    weights = q_norm.weight.data, k_norm.weight.data
    q, key, gate = ours.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, *weights, eps, size, heads)
    queries, gates = q_gate.view(5, heads, 2 * size).chunk(2, -1)
    torch.testing.assert_close(q.view(5, heads, size), q_norm(queries))
    torch.testing.assert_close(key.view(5, 2, size), k_norm(k.view(5, 2, size)))
    torch.testing.assert_close(gate, gates.reshape(5, -1))
    out = q.view(5, -1).clone()
    ours.fused_sigmoid_mul_cpu(out, gate)
    torch.testing.assert_close(out, q.view(5, -1) * gate.sigmoid())
    torch.testing.assert_close(
        ours.fused_rmsnorm_gated_cpu(q, gated.weight.data, queries.reshape(q.shape), eps),
        gated(q, queries.reshape(q.shape)),
    )


def test_joined_projections_come_apart() -> None:
    keys, values = H * K, HV * V
    qkvz, ba = torch.arange(2 * (2 * keys + 2 * values)).view(2, -1), torch.arange(4 * HV).view(2, -1)
    qkv, z, b, a = ours.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, H, HV, K, V)
    assert torch.equal(torch.cat([qkv, z.flatten(1)], 1), qkvz) and z.shape == (2, HV, V)
    assert torch.equal(torch.cat([b, a], 1), ba) and b.shape == a.shape == (2, HV)
