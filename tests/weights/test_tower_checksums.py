"""Checksums of engines that see: SGLang's of a folder that it has loaded are those computed of the folder's tensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fusionrl.engines.image_settings import ImageSettings
from fusionrl.models import families
from fusionrl.models.hf_io import HFReader
from fusionrl.models.shape import read_model_shape
from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums
from fusionrl.weights.verify import compare_checksums
from tests.engines.real_engine import real_engine
from tests.tiny_vision import make_tiny_vlm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


@pytest.mark.parametrize(
    ("kind", "tp_size", "sizes"),
    [("qwen2_5_vl", 2, {"tower_ffn": 100}), ("qwen3_vl_moe", 1, {"tower_ffn": 100})],
)
def test_checksums_are_those_of_sglang(
    tmp_path: Path, forked_engines: None, kind: str, tp_size: int, sizes: dict[str, Any]
) -> None:
    """Widths of the tower that SGLang pads, tensors that it joins, and those that two ranks divide."""
    make_tiny_vlm(tmp_path / kind, kind, **sizes)
    shape, reader = read_model_shape(tmp_path / kind, sees=True), HFReader(tmp_path / kind)
    tensors = ((name, reader.get(name, sizes)) for name, sizes in families.hf_shapes(shape).items())
    wanted = engine_checksums(tensors, shape, tp_size, mlp_multiple=CPU_MULTIPLE)
    engine = real_engine(tmp_path / kind, tmp_path, images=ImageSettings(True), tp_size=tp_size)
    try:
        engine.start()
        found = engine.weight_checksums()
    finally:
        engine.shutdown()
    assert found is not None
    assert [compare_checksums(*pair) for pair in zip(wanted, found, strict=True)] == [[]] * tp_size
