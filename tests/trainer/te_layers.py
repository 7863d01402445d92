"""A rank of a model of Transformer Engine's layers, built in host memory: it holds weights, and cannot compute.

    python -m tests.trainer.te_layers FOLDER TP RANK PORT

It builds the layers as a rank on a GPU does, reads FOLDER's weights into them and exports them again. It prints a
JSON object: names and shapes of the parameters, and the exported tensors that are not FOLDER's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import transformer_engine.pytorch  # noqa: F401  # first: the CPU layer hides it from Megatron otherwise

from fusionrl.models.shape import read_model_shape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import trainer_plan
from tests.trainer.trainer_worker import config_of


def main(folder: Path, tp: int, rank: int, port: int) -> None:
    """Build, load, export, compare."""
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
