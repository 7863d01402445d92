"""The functions of --bitwise, in a process of their own: what a row gets does not depend on the others."""

import pytest
import torch

from fusionrl.base.environment import DETERMINISTIC_CPU, MKL_MODE
from fusionrl.cpu import bitwise
from tests.own_process import run_code

_EXACT = """
import numpy as np
import torch
import torch.nn.functional as F
from fusionrl.cpu import bitwise, kernels, row_functions
from fusionrl.trainer.log_probs import chunked_log_probs

bitwise.start()
torch.manual_seed(1)
bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""

_PRODUCTS = """
for dtype in bound:
    x, w, b = (torch.randn(size).to(dtype) for size in ((64, 96), (40, 96), (40,)))
    whole = torch.nn.functional.linear(x, w, b)
    for count in (1, 2, 3, 17, 64):
        assert torch.equal(torch.nn.functional.linear(x[:count], w, b), whole[:count])
        assert torch.equal(torch.matmul(x[None, :count], w.t())[0] + b, whole[:count])
    x.requires_grad_()
    torch.nn.functional.linear(x, w, b).sum().backward()
    assert torch.allclose(x.grad, w.sum(0).expand(64, -1), rtol=0.02, atol=0.05)
"""

_NORMS = """
for dtype in bound:
    x, residual, weight = (torch.randn(size).to(dtype) for size in ((9, 64), (9, 64), (64,)))
    out, both = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(both, x + residual)
    assert torch.equal(out, row_functions.rms_norm(x + residual, weight, 1e-6))
"""

_ATTENTION = """
# Two siblings that share a prompt of 5 tokens, and a sequence alone; the last 2 tokens of the row are padding.
rows = [np.r_[0:5, 5:9], np.r_[0:5, 9:12], np.arange(12, 19)]
table = row_functions.plan_rows(rows, 21)
for dtype in bound:
    q, k, v = (torch.randn(21, heads, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))
    for window, sinks in ((None, None), (3, None), (None, torch.randn(4))):
        out = row_functions.attend(q, k, v, table, 0.25, window, sinks)
        for row in rows:
            for count in range(1, len(row) + 1):
                slots, length = torch.from_numpy(row[None].astype(np.int32)), torch.tensor([count])
                query, row_index = q[row[count - 1]][None].detach(), torch.tensor([0])
                options = {"scale": 0.25, "window": None if window is None else window - 1, "sinks": sinks}
                one = kernels.attend_decode(query, k.detach(), v.detach(), slots, row_index, length, **options)
                assert torch.equal(one[0], out[row[count - 1]])
        assert not out[19:].any()
        grads = torch.autograd.grad(out.float().pow(2).sum(), (q, k, v))
        bitwise._kept, kept = [], bitwise._kept
        usual = row_functions.attend(q, k, v, table, 0.25, window, sinks)
        expected = torch.autograd.grad(usual.float().pow(2).sum(), (q, k, v))
        bitwise._kept = kept
        for grad, want in zip(grads, expected, strict=True):
            assert (grad.float() - want.float()).norm() <= bound[dtype] * want.float().norm()
"""

_LOG_PROBS = """
for dtype in bound:
    hidden, weight = torch.randn(9, 32).to(dtype).requires_grad_(), torch.randn(50, 32).to(dtype)
    targets, temperature = torch.randint(0, 47, (9,)), torch.linspace(0.5, 1.5, 9)
    values, _ = chunked_log_probs(hidden, weight, targets, vocab_size=47, temperature=temperature)
    for i in range(9):
        logits = (hidden[i : i + 1] @ weight.t())[:, :47].float() / temperature[i]
        assert values[i] == logits.log_softmax(-1)[0, targets[i]]
    (grad,) = torch.autograd.grad(values.sum(), hidden)
    exact = ((hidden @ weight.t())[:, :47].float() / temperature[:, None]).log_softmax(-1).gather(1, targets[:, None])
    (want,) = torch.autograd.grad(exact.sum(), hidden)
    assert (grad - want).float().norm() <= 2e-2 * want.float().norm()
"""

_EXPERTS = """
from types import SimpleNamespace

for dtype in bound:
    first, second = torch.randn(4, 24, 16).to(dtype), torch.randn(4, 16, 12).to(dtype)
    layer = SimpleNamespace(num_experts=4, w13_weight=first, w2_weight=second, moe_tp_size=1, moe_tp_rank=0)
    x, (weights, experts) = torch.randn(33, 16).to(dtype), torch.rand(33, 4).topk(2, -1)
    out = bitwise.expert_outputs(layer, x, (weights, experts, None), None)
    want = torch.zeros(33, 16, dtype=torch.float64)
    for token in range(33):
        row = slice(token, token + 1)
        alone = bitwise.expert_outputs(layer, x[row], (weights[row], experts[row], None), None)
        assert torch.equal(alone, out[row])
        for weight, expert in zip(weights[token].double(), experts[token], strict=True):
            gate, up = (first[expert].double() @ x[token].double()).chunk(2)
            want[token] += weight * (second[expert].double() @ (gate * gate.sigmoid() * up))
    assert (out.double() - want).norm() <= bound[dtype] * want.norm()

# Two ranks with half of each expert's rows: the halves of an expert are added before the experts are.
from sglang.srt import distributed

for dtype in bound:
    halves = [(torch.randn(4, 24, 16).to(dtype), torch.randn(4, 16, 12).to(dtype)) for rank in range(2)]
    x, (weights, experts) = torch.randn(33, 16).to(dtype), torch.rand(33, 4).topk(2, -1)
    others = []
    adds = {1: lambda part: others.append(part) or part, 0: lambda part: part + others.pop()}
    outs = {}
    for rank in (1, 0):
        distributed.moe_tensor_model_parallel_all_reduce = adds[rank]
        first, second = halves[rank]
        layer = SimpleNamespace(num_experts=4, w13_weight=first, w2_weight=second, moe_tp_size=2, moe_tp_rank=rank)
        outs[rank] = bitwise.expert_outputs(layer, x, (weights, experts, None), None)
    want = torch.zeros_like(x)
    for expert in range(4):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        parts = []
        for first, second in halves:
            gate, up = F.linear(x[rows], first[expert]).chunk(2, -1)
            inner = (F.silu(gate) * up * weights[rows, places][:, None]).to(dtype)
            parts.append(F.linear(inner, second[expert]))
        want.index_add_(0, rows, parts[0] + parts[1])
    assert torch.equal(outs[0], want) and not outs[1].any()
"""


def test_functions_do_not_depend_on_the_batch() -> None:
    code = _EXACT + _PRODUCTS + _NORMS + _ATTENTION + _LOG_PROBS + _EXPERTS
    run_code(code, **dict([MKL_MODE]), **DETERMINISTIC_CPU)


def test_products_that_are_not_exact_are_told_with_their_library() -> None:
    def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        out = torch.stack([(matrix.t() * row).sum(-1) for row in rows])
        return out * (1 + 0.1 * (len(rows) == 3 and rows.dtype is torch.bfloat16))

    assert bitwise.product_faults(product) == ["bf16, by oneDNN: 3 rows"]


def test_the_process_does_not_start_with_products_that_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitwise, "product_faults", lambda product: ["fp32, by MKL: 1, 3 rows"])
    monkeypatch.setattr(bitwise, "_kept", [])
    monkeypatch.setattr(torch.library.Library, "impl", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(RuntimeError, match=r"--bitwise.*fp32, by MKL: 1, 3 rows.*MKL_CBWR.* ONEDNN_MAX_CPU_ISA="):
        bitwise.start()
