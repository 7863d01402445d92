"""What a flag that is left open comes to."""

from __future__ import annotations

import pytest

from fusionrl.plan.defaults import layer_impl, trainer_precision, trainer_threads


@pytest.mark.parametrize(
    ("wanted", "device", "precision"),
    [("auto", "cpu", "fp32"), ("auto", "cuda", "bf16"), ("bf16", "cpu", "bf16"), ("fp32", "cuda", "fp32")],
)
def test_precision(wanted: str, device: str, precision: str) -> None:
    assert trainer_precision(wanted, device) == precision


@pytest.mark.parametrize(
    ("wanted", "device", "has_fused_layers", "precision", "impl"),
    [
        ("auto", "cpu", True, "fp32", "local"),
        ("auto", "cpu", True, "bf16", "local"),
        ("auto", "cuda", True, "bf16", "transformer_engine"),
        ("auto", "cuda", True, "fp32", "local"),  # Transformer Engine has no packed attention in it
        ("auto", "cuda", False, "bf16", "local"),
        ("local", "cuda", True, "bf16", "local"),
        ("transformer_engine", "cuda", False, "bf16", "transformer_engine"),
    ],
)
def test_layers(wanted: str, device: str, has_fused_layers: bool, precision: str, impl: str) -> None:
    assert layer_impl(wanted, device, has_fused_layers, precision) == impl


@pytest.mark.parametrize(("given", "cores", "ranks", "threads"), [(None, 8, 2, 4), (None, 2, 4, 1), (3, 8, 8, 3)])
def test_threads(given: int | None, cores: int, ranks: int, threads: int) -> None:
    assert trainer_threads(given, cores, ranks) == threads
