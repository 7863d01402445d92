"""What models of SGLang get on a CPU, against transformers' modules, and by the modules that get it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from fusionrl.cpu import sglang_models
from tests.own_process import assert_runs

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@TYPES
def test_the_shared_expert_is_weighted_as_in_transformers(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, shared, out = (torch.randn(5, 32, generator=random).to(dtype) for _ in range(3))
    gate = torch.nn.Linear(32, 1, bias=False).to(dtype)
    wanted = out + torch.sigmoid(gate(hidden)) * shared  # Qwen2MoeSparseMoeBlock.forward
    sglang_models.add_gated(hidden, gate.weight.data.squeeze(), shared, out)
    bound = 1e-6 if dtype is torch.float32 else 3 * 2**-7
    torch.testing.assert_close(out, wanted.detach(), atol=bound, rtol=bound)


@TYPES
def test_norms_over_all_heads_are_those_of_transformers(dtype: torch.dtype) -> None:
    """MiniMax-M2's, of one rank and of two with half of the heads each."""
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(5, size, generator=random).to(dtype) for size in (48, 16))
    norms = [MiniMaxM2RMSNorm(size, eps=1e-6).to(dtype) for size in (48, 16)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.randn(norm.weight.shape, generator=random))
    wanted = [norm(rows).detach() for norm, rows in zip(norms, (query, key), strict=True)]
    for num_ranks in (1, 2):
        ranks = list(zip(query.chunk(num_ranks, 1), key.chunk(num_ranks, 1), strict=True))
        squares = sum(sglang_models.squares_of_rows(*rank) for rank in ranks)
        weights = zip(*(norm.weight.data.chunk(num_ranks) for norm in norms), strict=True)
        outs = [
            sglang_models.norm_rows(*rank, *weight, squares, num_ranks, 1e-6)
            for rank, weight in zip(ranks, weights, strict=True)
        ]
        bound = 1e-6 if dtype is torch.float32 else 2**-6
        for out, one in zip(zip(*outs, strict=True), wanted, strict=True):
            torch.testing.assert_close(torch.cat(out, 1), one, atol=bound, rtol=bound)


def test_zeros_of_one_rank_stay_out_of_what_ranks_share() -> None:
    """SGLang's gpt-oss zeroes a bias of ranks but the first where it is: a push has it in memory of several engines."""

    class Model:
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], is_nextn: bool = False) -> list[str]:
            loaded = dict(weights)
            loaded["model.layers.0.mlp.experts.down_proj_bias"].zero_()
            return list(loaded)

    sglang_models._change_gpt_oss(SimpleNamespace(GptOssForCausalLM=Model, GptOssAttention=type("Any", (), {})))  # type: ignore[arg-type]
    shared = {f"model.layers.0.mlp.experts.{name}": torch.ones(2, 3) for name in ("down_proj", "down_proj_bias")}
    assert Model().load_weights(shared.items(), is_nextn=False) == list(shared)
    assert all(tensor.eq(1).all() for tensor in shared.values())


def test_sglang_has_each_part_that_is_changed() -> None:
    """A newer SGLang may have renamed one: an engine with such a model would fail at its first request."""
    assert_runs(
        """
import importlib
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from fusionrl.base import cpu_wing
cpu_wing.install_stand_ins()
import torch
from fusionrl.cpu import delta_rule, sglang_models
missing = [name for name in delta_rule.OPERATIONS if not hasattr(torch.ops.sgl_kernel, name)]
assert missing == list(delta_rule.OPERATIONS), "SGLang's kernels have some now: drop ours"
delta_rule.register()
sglang_models.register()
for name in sglang_models._CHANGES:
    importlib.import_module(f"sglang.{name}")
from sglang.srt.models import deepseek_v2, gpt_oss, minimax_m2, qwen2_moe
assert qwen2_moe.fused_gate_sigmoid_mul_add is sglang_models.add_gated
assert minimax_m2.rms_apply_serial is sglang_models.norm_rows
assert gpt_oss.GptOssForCausalLM.load_weights.__module__ == "fusionrl.cpu.sglang_models"
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
handler = AttentionBackendRegistry.get_handler(cpu_wing.ATTENTION_BACKEND)
assert handler(None, None).name == "MLA" and handler is not AttentionBackendRegistry.get_handler("triton")
from sglang.srt.layers.rotary_embedding.factory import get_rope_wrapper
get_rope_wrapper(16, 16, 64, 10000, False, None, device="cpu")
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
assert gdn_backend.causal_conv1d_fn is delta_rule.causal_conv1d_fn_cpu
assert gdn_backend.fused_gdn_gating is delta_rule.fused_gdn_gating_cpu
assert gdn_triton.chunk_gated_delta_rule is delta_rule.chunk_gated_delta_rule_cpu
"""
    )
