"""The program that reads the launch files of checkouts: each file is counted once, and each refusal has its reason."""

from pathlib import Path

import pytest

from tests.tools.conftest import Command
from tools import from_slime_scripts

LAUNCH = "ray job submit -- python3 train.py --hf-checkpoint /m --num-rollout 2 --rollout-batch-size 4 "
PYTHON = "import slime.utils.external_utils.command_utils as U\nU.execute_train({text!r}, 8, None)\n"


def test_files_of_two_checkouts(tmp_path: Path, command: Command) -> None:
    for place, text in {
        "one/run.sh": f"{LAUNCH} --judge-url http://x\n",
        "one/lora.sh": f"{LAUNCH} --experts-shared-outer-loras --lr $LR\n",
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
    code, shown = command(from_slime_scripts.main, tmp_path / "one", tmp_path / "two")
    assert code == 0
    lines = shown.splitlines()
    judged = [line.removesuffix(" (?)") for line in lines if line.startswith(("parses", "refused "))][:5]
    refused = [f"refused {file}" for file in ("one/lora.sh", "one/open.sh", "two/fails.py")]
    assert judged == [*refused[:2], "parses  one/run.sh", refused[2], "parses  two/launch.py"]
    assert "         custom: --judge-url" in lines
    (reason,) = [line for line in lines if line.startswith("         --experts-shared-outer-loras: ")]
    assert "each expert has an A" in reason and not any("$LR" in line or "${LR}" in line for line in lines)
    assert any("unexpected EOF" in line for line in lines) and any("ZeroDivisionError" in line for line in lines)
    assert lines[-1].startswith("all: 2 of 5 files parse, 1 of them with flags of their own")


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("a.sh", "bash -c 'cd x && python slime/train_async.py'\n", True),
        ("a.sh", "python pretrain.py\n", False),
        ("a.py", "os.system(f'python3 {root}/train.py')\n", True),
        ("a.py", "def execute_train(args): ...\nexecute_train('')\n", False),
        ("Megatron-LM/a.sh", "python3 train.py\n", False),
    ],
)
def test_which_files_start_runs(name: str, text: str, is_one: bool) -> None:
    assert from_slime_scripts.is_launch_file(Path(name), text) is is_one
