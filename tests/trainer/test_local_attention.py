"""Attention within windows and with sinks, by our kernel and by torch's attention, against the formula in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionrl.cpu import kernels, megatron_patches
from tests.trainer.test_micro_batches import options

HEADS, GROUPS, SIZE, SCALE = 4, 2, 12, 0.3


def attention(window: int | None, has_sinks: bool) -> Any:
    megatron_patches.install()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from fusionrl.trainer.local_attention import SDPACoreAttention

    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    config = TransformerConfig(**sizes, use_cpu_initialization=True, attention_dropout=0.0)
    kind = type("Chosen", (SDPACoreAttention,), {"window": window, "has_sinks": has_sinks, "own_scale": SCALE})
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=None)
    module = kind(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    if has_sinks:
        torch.nn.init.normal_(module.softmax_offset)
    return module


def exact(qkv: Tensor, sinks: Tensor | None, rows: Any, window: int | None) -> Tensor:
    """Each sequence by itself, [T, heads * size]; of tokens that several have, any one's."""
    query, key, value = qkv.split([HEADS, GROUPS, GROUPS], 1)
    out = torch.zeros(query.size(0), HEADS, SIZE, dtype=query.dtype)
    for row in map(torch.from_numpy, rows):
        q, k, v = query[row], *(x[row].repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
        scores = SCALE * torch.einsum("ihd,jhd->hij", q, k)
        back = torch.arange(len(row))[:, None] - torch.arange(len(row))
        scores = scores.masked_fill((back < 0) | (back >= (window or len(row))), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(row), 1)], -1)
        shares = scores.softmax(-1)[..., : len(row)]
        out = out.index_put((row,), torch.einsum("hij,jhd->ihd", shares, v))
    return out.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_ours", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_outputs_and_gradients_of_packed_sequences(
    window: int | None, has_sinks: bool, is_ours: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings that share a prompt, short and long; one sequence shorter than the window."""
    torch.manual_seed(1)
    module = attention(window, has_sinks)
    from fusionrl.trainer.packed_row import pack_row

    if not is_ours:
        monkeypatch.setattr(kernels, "fit", lambda *tensors: False)
    for prompt in (7, 300):
        lengths = (prompt + 60, prompt + 20, prompt + 33, 6)
        prompts = [prompt] * 3 + [2]
        sequences = [np.arange(length) + 1000 * (number == 3) for number, length in enumerate(lengths)]
        row = pack_row(sequences, prompts, options())
        assert row.layout.positions is not None, "prompts are not shared"
        wide = torch.randn(row.tokens.size(1), HEADS + 2 * GROUPS, SIZE).to(dtype).requires_grad_()
        double = wide.detach().double().requires_grad_()
        out = module(*wide.split([HEADS, GROUPS, GROUPS], 1), packed_seq_params=row.layout)
        sinks = module.softmax_offset
        far = sinks.detach().double().requires_grad_() if has_sinks else None
        want = exact(double, far, row.rows, window)
        # Each packed token counts once, whatever sequence its result is of.
        weights = torch.randn_like(want).to(dtype).double()
        found = torch.autograd.grad((out * weights.to(dtype)).sum(), [wide, *([sinks] if has_sinks else [])])
        right = torch.autograd.grad((want * weights).sum(), [double, *([far] if far is not None else [])])
        bound = 5e-6 if dtype is torch.float32 else 2e-2
        for ours, theirs in zip((out, *found), (want, *right), strict=True):
            assert ours.isfinite().all()
            assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()


def test_nothing_comes_from_outside_of_a_window() -> None:
    """The gradient of a token's answer by what it does not see is exactly 0."""
    torch.manual_seed(1)
    module = attention(9, False)
    from fusionrl.trainer.packed_row import pack_row

    row = pack_row([np.arange(41), np.arange(100, 131)], [1, 1], options())
    wide = torch.randn(row.tokens.size(1), HEADS + 2 * GROUPS, SIZE, requires_grad=True)
    out = module(*wide.split([HEADS, GROUPS, GROUPS], 1), packed_seq_params=row.layout)
    for token, seen in ((30, range(22, 31)), (40, range(40, 41)), (52, range(44, 53))):
        (grad,) = torch.autograd.grad(out[token].sum(), wide, retain_graph=True)
        assert grad.flatten(1).any(1).nonzero().flatten().tolist() == list(seen)
