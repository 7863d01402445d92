"""The MLP of the local layer spec is Megatron's, computed in fewer calls where it is a plain gated SiLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from fusionrl.trainer.swiglu import swiglu
from tests.trainer.trainer_worker import config_of

if TYPE_CHECKING:
    from fusionrl.trainer.model_rank import ModelRank

CHANGES = (
    {"glu_linear_offset": 1.0},
    {"activation_func_clamp_value": 0.1},
    {"gated_linear_unit": True},  # nothing changes
)


def values_and_gradients(rank: ModelRank, changes: dict[str, object]) -> None:
    """Compare an MLP of the rank's model with Megatron's own forward pass."""
    from megatron.core.transformer.mlp import MLP

    from fusionrl.trainer.layers import LocalMLP

    (mlp, *_) = [m for chunk in rank.trained.chunks for m in chunk.modules() if isinstance(m, MLP)]
    assert type(mlp) is LocalMLP
    kept = {name: getattr(mlp.config, name) for name in changes}
    vars(mlp.config).update(changes)
    hidden = torch.randn(5, 1, mlp.config.hidden_size, requires_grad=True)
    (ours, _), (theirs, _) = mlp(hidden), MLP.forward(mlp, hidden)
    weights = torch.randn_like(ours)
    found = [torch.autograd.grad((out * weights).sum(), hidden)[0] for out in (ours, theirs)]
    vars(mlp.config).update(kept)
    # Its own way is Megatron's bit by bit; the kernel of the plain gate rounds otherwise.
    tolerance = 0.0 if changes != {"gated_linear_unit": True} else 1e-6
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_an_mlp_computes_what_megatrons_does(workers, hf, changes: dict[str, object]) -> None:
    workers.start(config_of(hf("llama", True)[0]))
    workers.run(values_and_gradients, changes)


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
