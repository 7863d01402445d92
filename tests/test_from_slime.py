"""`fusionrl from-slime` and the shim, from the outside: a script in, a command out, which the plan takes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.cli import main
from fusionrl.cli.from_slime import make_shim
from fusionrl.config.parser import read_args

SCRIPT = """\
set -ex
NUM_GPUS=${NUM_GPUS:-2}
HAS_NVLINK=$(nvidia-smi topo -m | grep -c NV)
source "$(dirname -- "${BASH_SOURCE[0]}")/models/tiny.sh"
CKPT_ARGS=(
   --hf-checkpoint "${MODEL:-/models/tiny}"
   #--hf-checkpoint /models/other
   --save /runs/tiny/
   --load /runs/tiny/
   --save-interval 20
)
ARGS=(
   --prompt-data "$DATA/train.jsonl"
   --rollout-batch-size 4 --num-rollout 2 --rollout-max-response-len 8
   --rm-type math
   --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98
   --optimizer adam
   --attention-backend flash
   --use-wandb --wandb-key ${WANDB_KEY}
)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/x\\", \\"JUDGE\\": \\"${HAS_NVLINK}\\"}}" \\
   -- python3 train.py \\
   --actor-num-gpus-per-node ${NUM_GPUS} \\
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" \\
   ${ARGS[@]}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(--swiglu --num-layers $((1 + 1)))\n")
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    return file


def test_the_printed_command(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-slime", str(script), "--set", "MODEL=/my model"]) == 0
    out = capsys.readouterr().out
    comments = " ".join(line.lstrip("# ") for line in out.splitlines() if line.startswith("#"))
    command = "\n".join(line for line in out.splitlines() if not line.startswith("#"))
    for text in (
        *("--save /runs/tiny/: it is --run-dir /runs/tiny/", "it is --resume", "2 flags of the model's shape"),
        *("--attention-backend flash", "--optimizer adam", "there is no W&B here", "--wandb-key: left out"),
        *("the job sets JUDGE", "slime's defaults, which are others here: --no-calculate-per-token-loss"),
        "${DATA} is left as the script has it",
    ):
        assert text in comments, (text, comments)
    assert "WANDB_KEY" not in out and '"${DATA}/train.jsonl"' in command
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["fusionrl", "train"] and "/my model" in words
    config, errors = read_args(words[2:])
    assert errors == [] and config.passthrough.slime == {}
    assert (config.run.run_dir, config.run.resume, config.train.weight_decay) == ("/runs/tiny/", True, 0.1)
    assert (config.data.tool_key, config.algorithm.calculate_per_token_loss) == ("tools", False)
    assert config.cluster.actor_num_gpus_per_node == 2


def test_a_flag_that_is_not_here_is_in_the_comments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("--optimizer adam", "--optimizer sgd"))
    assert main(["from-slime", str(script)]) == 0
    out = capsys.readouterr().out
    assert "# NOT HERE --optimizer sgd: the optimizer is Adam" in out and "    --optimizer" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no.sh"], "no.sh: it cannot be read"),
        (["--set", "X"], "--set X: NAME=VALUE is wanted"),
        (["a.sh", "b.sh"], "b.sh: one script at a time"),
        (["--flag"], "--flag: unknown"),
        (["--shim"], "--shim: it needs a value"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-slime", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_shim_takes_slimes_arguments(tmp_path: Path) -> None:
    """`python train.py …` is `fusionrl train …`: here up to the checks, which name what is wrong."""
    train, other = make_shim(str(tmp_path))
    assert [train.name, other.name] == ["train.py", "train_async.py"] and make_shim(str(tmp_path)) == [train, other]
    for file in (train, other):
        argv = ["--swiglu", "--save", str(tmp_path / "run"), "--hf-checkpoint", str(tmp_path / "no"), "--fp16"]
        done = subprocess.run([sys.executable, str(file), *argv], capture_output=True, text=True)
        assert done.returncode == 2
        assert "--fp16: there is no training in fp16" in done.stderr and "there is no such folder" in done.stderr
        assert "slime's defaults: --no-calculate-per-token-loss" in done.stderr
    train.write_text("mine\n")
    with pytest.raises(ValueError, match="is there already"):
        make_shim(str(tmp_path))
