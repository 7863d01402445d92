"""The program that reads the launch files of checkouts: each file is counted once, and each refusal has its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.from_slime_scripts import is_launch_file

ROOT = Path(__file__).parents[2]
LAUNCH = "ray job submit -- python3 train.py --hf-checkpoint /m --num-rollout 2 --rollout-batch-size 4 "
PYTHON = "import slime.utils.external_utils.command_utils as U\nU.execute_train({text!r}, 8, None)\n"


def test_files_of_two_checkouts(tmp_path: Path) -> None:
    for place, text in {
        "one/run.sh": f"{LAUNCH} --judge-url http://x\n",
        "one/lora.sh": f"{LAUNCH} --lora-rank 8 --lr $LR\n",
        "one/late.sh": f"{LAUNCH} --sglang-config $FILE\n",  # refused whatever the file is
        "one/open.sh": f'{LAUNCH} "\n',
        "one/kill.sh": "pkill -f train.py\n",
        "one/notes.py": "# python train.py\n",
        "two/copy.sh": f"{LAUNCH} --judge-url http://x\n",
        "two/launch.py": PYTHON.replace("{text!r}", repr("--custom-config-path conf/a.yaml --lr 1e-6")),
        "two/conf/a.yaml": "a: 1\n",
        "two/fails.py": PYTHON.replace("{text!r}", "f'{1 / 0}'"),
    }.items():
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "tools/from_slime_scripts.py", str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("parses", "refused "))][:6] == [
        "refused one/late.sh (?)",
        "refused one/lora.sh (?)",
        "refused one/open.sh (?)",
        "parses  one/run.sh (?)",
        "refused two/fails.py (?)",
        "parses  two/launch.py (?)",
    ]
    assert "         custom: --judge-url" in lines
    (reason,) = [line for line in lines if line.startswith("         --lora-rank 8: ")]
    assert "adapters" in reason and not any("$LR" in line or "${LR}" in line for line in lines)
    assert any("unexpected EOF" in line for line in lines) and any("ZeroDivisionError" in line for line in lines)
    assert lines[-1].startswith("all: 2 of 6 files parse, 1 of them with flags of their own")


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("a.sh", "python3 train.py\n", True),
        ("a.sh", "bash -c 'cd x && python slime/train_async.py'\n", True),
        ("a.sh", "# python train.py\n", False),
        ("a.sh", "python pretrain.py\n", False),
        ("a.py", "os.system(f'python3 {root}/train.py')\n", True),
        ("a.py", "def execute_train(args): ...\nexecute_train('')\n", False),
        ("Megatron-LM/a.sh", "python3 train.py\n", False),
    ],
)
def test_which_files_start_runs(name: str, text: str, is_one: bool) -> None:
    assert is_launch_file(Path(name), text) is is_one
