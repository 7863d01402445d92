"""A launch script as slime's users have it: read, printed as our command, and run by a shell; then run by the shim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of

pytestmark = pytest.mark.e2e

SCRIPT = """\
SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
MODEL_ARGS=(
   --swiglu --num-layers {layers} --hidden-size {hidden} --normalization "RMSNorm" --qk-layernorm
)
CKPT_ARGS=(
   --hf-checkpoint {task}/model
   --save ${{SCRIPT_DIR}}/out   # and go on there
   --load ${{SCRIPT_DIR}}/out
)
ROLLOUT_ARGS=(
   --prompt-data {task}/train.jsonl --input-key prompt --label-key label --apply-chat-template
   --rm-type exact --num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 4
   --global-batch-size 8
)
OPTIMIZER_ARGS=(
   --optimizer adam --lr 1e-4 --lr-decay-style constant --lr-warmup-fraction 0.5
   --accumulate-allreduce-grads-in-fp32 --attention-backend flash
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 1 \\
   --colocate ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} ${{ROLLOUT_ARGS[@]}} \\
   ${{OPTIMIZER_ARGS[@]}}
"""


def steps_of(run_dir: Path) -> list[float]:
    """Trained samples of each step."""
    return [row["train/num_samples"] for row in metrics_of(run_dir) if "train/num_samples" in row]


def test_a_script_runs_and_the_shim_goes_on(task: Path, tmp_path: Path) -> None:
    shape = json.loads((task / "model" / "config.json").read_text())
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(task=task, layers=shape["num_hidden_layers"], hidden=shape["hidden_size"]))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ask = [sys.executable, "-m", "fusionrl.cli", "from-slime", str(script), "--shim", str(tmp_path / "shim")]
    printed = subprocess.run(ask, capture_output=True, text=True, check=True, env=env).stdout
    command = printed.replace("fusionrl train", f"{sys.executable} -m tests.warm_start train --device cpu")
    first = subprocess.run(["bash", "-e"], input=command, capture_output=True, text=True, env=env, timeout=240)
    assert first.returncode == 0, first.stderr[-3000:]
    assert steps_of(tmp_path / "out") == [8]

    # The same script on a machine where `train.py` is the shim's; its folder has a run, so it goes on.
    text = script.read_text().replace(
        "ray job submit -- python3 train.py", f"{sys.executable} shim/train.py --device cpu"
    )
    script.write_text(text.replace("--num-rollout 1", "--num-rollout 2"))
    again = subprocess.run(["bash", "run.sh"], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "slime's defaults: --no-calculate-per-token-loss" in again.stderr
    assert steps_of(tmp_path / "out") == [8, 8]
