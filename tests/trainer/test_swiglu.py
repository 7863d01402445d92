"""`silu(gate) * up` as one function: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusionrl.trainer.swiglu import swiglu


def _plain(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_silu_and_product(dtype: torch.dtype) -> None:
    both = torch.randn(5, 1, 12, dtype=dtype)
    torch.testing.assert_close(swiglu(both), _plain(both))


def test_gradients_are_those_of_autograd() -> None:
    both = torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, both)
    weights = torch.randn(12, 5, dtype=torch.float64).t()[:, None, :6]  # a gradient that is no row after the other
    (ours,) = torch.autograd.grad((swiglu(both) * weights).sum(), both)
    (theirs,) = torch.autograd.grad((_plain(both) * weights).sum(), both)
    torch.testing.assert_close(ours, theirs)


def test_another_device_needs_no_kernel() -> None:
    both = torch.zeros(3, 8, device="meta", requires_grad=True)
    swiglu(both).sum().backward()
    assert both.grad is not None and both.grad.shape == (3, 8)
