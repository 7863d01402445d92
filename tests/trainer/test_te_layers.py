"""Transformer Engine's layers, built without a device: their parameters are those that our rules name."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fusionrl.base.group_stores import create_group_store
from fusionrl.models import families
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import trainer_plan
from tests.trainer import hf_models
from tests.trainer.trainer_worker import config_of
from tools.proof.machine import ROOT, has_package

pytestmark = pytest.mark.skipif(
    not has_package("transformer_engine"), reason="needs Transformer Engine: scripts/test.sh --set gpu"
)


def built(folder: Path, tp: int) -> list[dict[str, Any]]:
    """What each rank of `main` found."""
    store = create_group_store("127.0.0.1", 120.0)
    command = [sys.executable, "-m", "tests.trainer.test_te_layers", str(folder), str(tp)]
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


def main(folder: Path, tp: int, rank: int, port: int) -> None:
    """Build the layers as a rank on a GPU does, in host memory; read FOLDER's weights into them and export them again.

    Print a JSON object: names and shapes of the parameters, and the exported tensors that are not FOLDER's.
    """
    import transformer_engine.pytorch  # noqa: F401  # first: the CPU layer hides it from Megatron otherwise

    layout, cpu = TrainerLayout(tp, tp=tp), torch.device("cpu")
    # The plan of a GPU: its settings, but that Megatron makes the tensors here and not on a device.
    passed = {"transformer": {"use_cpu_initialization": True}}
    config = config_of(folder, precision="bf16", device="cuda", passthrough=passed)
    plan = trainer_plan(config, layout, "cuda")
    from fusionrl.trainer import process_groups

    process_groups.join_ranks(layout, rank, cpu, ("127.0.0.1", port), seed=1, timeout_minutes=9)
    from fusionrl.models.hf_io import HFReader, iter_hf_tensors, load_hf, local_tensors
    from fusionrl.trainer.model import build_model

    shape = read_model_shape(folder)
    # Its classes ask whether there is a GPU before they make anything, and of which kind.
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0)),
    ):
        chunks, transformer = build_model(config, shape, plan, cpu)
    load_hf(folder, chunks, shape)
    exported = dict(iter_hf_tensors(chunks, transformer, shape))
    reader = HFReader(folder)
    wrong = [
        name
        for name, tensor in exported.items()
        if not torch.equal(tensor.float(), reader.get(name, tensor.shape).to(tensor.dtype).float())
    ]
    found = {
        "impl": transformer.transformer_impl,
        "classes": sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()}),
        "local": {name: list(tensor.shape) for name, _, tensor in local_tensors(chunks, shape)},
        "exported": sorted(exported),
        "wrong": wrong,
    }
    print("\n" + json.dumps(found))
    process_groups.leave_ranks()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
