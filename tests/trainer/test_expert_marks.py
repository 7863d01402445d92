"""Which parameters count in the norm of the gradients on every tensor-parallel rank, and in which optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionrl.base import cpu_wing


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_what_is_added_to_an_expert_is_marked_as_its_weights_are(tensor_size: int) -> None:
    """At size 1 the ranks of a tensor-parallel group share an expert's state: each counts its part of it."""
    cpu_wing.prepare_megatron()
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    from fusionrl.trainer.model import mark_experts

    block, layer = torch.nn.Module(), torch.nn.Module()
    block.layer = layer  # type: ignore[assignment]
    layer.mlp = torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2), "router": torch.nn.Linear(2, 2)})
    mark_experts(block, tensor_size)
    second_rank: Any = SimpleNamespace(rank=lambda: 1)
    for name, parameter in block.named_parameters():
        is_expert = ".experts." in name
        assert param_is_not_tensor_parallel_duplicate(parameter, second_rank) is (is_expert and tensor_size == 1)
        assert getattr(parameter, "allreduce", True) is not is_expert
