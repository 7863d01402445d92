"""A process with a CUDA device imports nothing of the wing `cpu`. Here a decision stands for the device."""

import importlib.util
from pathlib import Path

import pytest

from tests.own_process import run_code

_GPU = """
import sys
from fusionrl.base import cpu_wing
cpu_wing.lacks_cuda = lambda: False
cpu_wing.STAND_INS = ()  # a GPU's requirement set has these packages
"""
_ABSENT = """
wing = [name for name in sys.modules if name.startswith("fusionrl.cpu")]
assert not wing, wing
"""
_TRAINER = """
import numpy as np
import torch
import tests.trainer.rank_imports
import fusionrl.trainer.checkpoint_io
import fusionrl.trainer.policy
import fusionrl.trainer.process_groups
import fusionrl.trainer.settings
from megatron.core.transformer import TransformerConfig
from fusionrl.trainer.local_layers import LocalNorm, swiglu
from fusionrl.trainer.micro_batches import BatchOptions, Slicing
from fusionrl.trainer.packed_row import pack_row

options = BatchOptions(Slicing(), torch.device("meta"), 1.0, None, local_attention=True)
assert pack_row([np.zeros(9, np.int64)] * 2, [1, 1], options).layout.table is None
assert swiglu(torch.zeros(3, 8, device="meta")).shape == (3, 4)
config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm", use_cpu_initialization=True
)
assert type(LocalNorm(config, 8)) is torch.nn.RMSNorm
"""
_ENGINE = """
from fusionrl.engines import launch_server
from fusionrl.engines.spec import EngineSpec, server_command, server_environment

spec = EngineSpec(0, sys.argv.pop(1), "cuda", "bfloat16", 1, (0,), "127.0.0.1", None, "", 0)
assert server_environment(spec)["FUSIONRL_DEVICE"] == "cuda"
assert "--device" in server_command(spec, 1, 2)
with launch_server._light():
    pass
"""
_PLAN = """
from fusionrl import cli
from fusionrl.cli import device

device.detect_device = lambda wanted: "cuda"
for cluster in ([], ["--cluster", "1x8xh100"]):  # here and elsewhere
    assert cli.main(["plan", *sys.argv[1:], "--device", "cuda", *cluster]) == 0
"""


def _run(code: str, *argv: str) -> None:
    run_code(_GPU + code + _ABSENT, *argv, FUSIONRL_DEVICE="cuda", CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_a_trainer_rank() -> None:
    _run(_TRAINER)


def test_an_engine_and_a_plan_for_gpus(tiny_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n' * 8)
    data = ["--prompt-data", str(prompts), "--input-key", "prompt", "--label-key", "label", "--rm-type", "math"]
    sizes = ["--rollout-batch-size", "8", "--rollout-max-response-len", "8", "--num-rollout", "1", "--colocate"]
    flags = ["--mode", "rl", "--hf-checkpoint", str(tiny_model), "--apply-chat-template", *data, *sizes]
    _run(_ENGINE + _PLAN, str(tiny_model), *flags)
