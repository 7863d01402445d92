"""The GPU of a rank: the number that its own process has for it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from fusionrl.config.config import Config
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import TrainerPlan
from fusionrl.trainer.settings import installed_impl, rank_device

PLAN = TrainerPlan(TrainerLayout(1), "cuda", "bf16", 1, None, {}, None)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counted round would share a GPU, and NCCL would say so minutes later; so a place that is not seen ends."""
    assert rank_device(PLAN, 4, 1) == torch.device("cuda", 1)
    assert [rank_device(PLAN, rank).index for rank in range(3)] == [0, 1, 0]  # tools place nothing
    with pytest.raises(ValueError, match=r"rank 1: placed on GPU 7 of its node, where torch sees 2 \(6,7\)"):
        rank_device(PLAN, 1, 7)
    with pytest.raises(ValueError, match="--device cpu: a CUDA device is visible"):  # Megatron would put buffers there
        rank_device(replace(PLAN, device="cpu"), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        rank_device(PLAN, 0)


@pytest.mark.parametrize(
    ("wanted", "device", "is_installed", "impl"),
    [
        ("auto", "cuda", True, "transformer_engine"),
        ("auto", "cuda", False, "local"),
        ("auto", "cpu", True, "local"),
        ("transformer_engine", "cuda", True, "transformer_engine"),
        ("transformer_engine", "cuda", False, None),
        ("transformer_engine", "cpu", True, None),
    ],
)
def test_whose_layers_a_rank_has(
    wanted: str, device: str, is_installed: bool, impl: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    config = Config.from_flat({"transformer_impl": wanted})
    if impl is None:
        with pytest.raises(ValueError, match="it needs a CUDA device and the package"):
            installed_impl(config, device, "bf16")
    else:
        assert installed_impl(config, device, "bf16") == impl
