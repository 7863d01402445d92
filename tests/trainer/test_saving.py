"""What rank 0 alone does to a checkpoint, without trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionrl.trainer.checkpoint import read_description

COUNTERS = {"rollout_id": 1, "optimizer_steps": 2, "skipped": 0}


@pytest.mark.parametrize(
    ("description", "refusal"),
    [
        ({"format": 2, "files": {}}, None),
        ({"format": 1}, None),
        ({"format": 1, "files": {}}, "has hashes, and the format that had none"),
        ({"format": 3}, "this version reads 1 and 2"),
        ({}, "format None"),
    ],
)
def test_which_formats_are_read(description: dict[str, object], refusal: str | None, tmp_path: Path) -> None:
    (tmp_path / "fusionrl.json").write_text(json.dumps({"counters": COUNTERS, **description}))
    if refusal is None:
        assert read_description(str(tmp_path))["counters"] == COUNTERS
        return
    with pytest.raises(ValueError, match=refusal):
        read_description(str(tmp_path))
