"""Transformer Engine's layers, built without a device: their parameters are those that our rules name.

The layers compute on a GPU alone; names and shapes they have everywhere. It needs the package, which the GPU
requirement set has (`scripts/test.sh --set gpu`).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionrl.base.torch_stores import create_group_store
from fusionrl.models import families
from fusionrl.models.shape import read_model_shape
from tests.trainer import hf_models
from tools.proof.machine import ROOT, has_package

pytestmark = pytest.mark.skipif(
    not has_package("transformer_engine"), reason="needs Transformer Engine: scripts/test.sh --set gpu"
)


def built(folder: Path, tp: int) -> list[dict[str, Any]]:
    """What each rank of `te_layers` found."""
    store = create_group_store("127.0.0.1", 120.0)
    command = [sys.executable, "-m", "tests.trainer.te_layers", str(folder), str(tp)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(tp)
    ]
    ends = [rank.communicate(timeout=600) for rank in ranks]
    for rank, (output, errors) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, output[-2000:] + errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ends]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", sorted(hf_models.FAMILIES))
def test_names_and_shapes_are_those_of_our_rules(tmp_path: Path, family: str, tp: int) -> None:
    hf_models.make(tmp_path, family, tied=False, vocab_size=128)  # Transformer Engine takes multiples of 16
    shape = read_model_shape(tmp_path)
    ranks = built(tmp_path, tp)
    rules = families.model_rules(shape)
    for found in ranks:
        assert found["impl"] == "transformer_engine"
        assert any(name.startswith("TE") for name in found["classes"]), found["classes"]
        assert set(found["local"]) == set(rules), "the layers' names and the table's"
        assert found["wrong"] == [], "weights that changed on their way through the layers"
        assert found["exported"] == sorted(families.hf_shapes(shape))
    for name, rule in rules.items():
        sizes = [found["local"][name] for found in ranks]
        assert all(size == sizes[0] for size in sizes)
        whole = rule.numel
        held = sum(map(math.prod, sizes))
        # The layout's experts are not cut (ETP 1), and not shared out (EP 1): each rank has all of them.
        is_whole = rule.split == "replicated" or rule.expert is not None
        assert held == whole * (tp if is_whole else 1), f"{name}: {sizes} of {whole} values"
