"""Gradients of weights that Megatron-core's linear layers add in place on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusionrl.cpu.gradients import add_gradient, scale, unless_alone
from tests.own_process import assert_runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_to_those_before(dtype: torch.dtype) -> None:
    inputs, grad = torch.randn(7, 3, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    before = torch.randn(5, 3)
    total = before.clone()
    add_gradient(inputs, grad, total)
    torch.testing.assert_close(total, before + (grad.t() @ inputs).float())


def test_clipping_needs_no_memory_where_source_and_target_are_one() -> None:
    same, source, target = torch.ones(3), torch.ones(3), torch.zeros(3)
    place = same.data_ptr()
    scale(65536, torch.zeros(1), [[same, source], [same, target]], torch.tensor(0.5))
    assert same.data_ptr() == place
    assert same.tolist() == target.tolist() == [0.5] * 3
    assert source.tolist() == [1.0] * 3


def test_one_rank_exchanges_nothing() -> None:
    calls: list[bool] = []
    alone, two = (SimpleNamespace(size=lambda n=n: n) for n in (1, 2))
    call = unless_alone(lambda output, inputs, op=None, group=None, async_op=False: calls.append(async_op))
    whole, other = torch.arange(4.0), torch.zeros(4)
    call(whole[:4], whole, op="sum", group=alone)
    call(other, whole, op="sum", group=alone)
    assert torch.equal(other, whole)
    assert not calls
    call(other, whole, group=two)
    call(other, whole, group=alone, async_op=True)  # whoever asks waits for what it returns
    assert calls == [False, True]


def test_megatrons_linear_layers_use_it() -> None:
    """A process of its own, as the shims are for good."""
    code = (
        "import torch\n"
        "from fusionrl.cpu import megatron_patches\n"
        "assert megatron_patches.install()\n"
        "import megatron.core\n"
        "from megatron.core.tensor_parallel import layers\n"
        "megatron_patches.patch()\n"
        "assert layers._grad_accum_fusion_available\n"
        "def train(fuses):\n"
        "    torch.manual_seed(1)\n"
        "    weight = torch.nn.Parameter(torch.randn(5, 3))\n"
        "    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(5, 3), False\n"
        "    inputs = torch.randn(7, 1, 3, requires_grad=True)\n"
        "    linear = layers.LinearWithGradAccumulationAndAsyncCommunication.apply\n"
        "    linear(inputs, weight, None, fuses, False, False, None, 0, None).pow(2).sum().backward()\n"
        "    if not weight.grad_added_to_main_grad:\n"
        "        weight.main_grad += weight.grad\n"
        "    return weight.main_grad, inputs.grad, weight.grad_added_to_main_grad\n"
        "(ours, of_inputs, added), (plain, expected, not_added) = train(True), train(False)\n"
        "assert added and not not_added\n"
        "torch.testing.assert_close(ours, plain)\n"
        "assert torch.equal(of_inputs, expected)\n"
    )
    assert_runs(code)
