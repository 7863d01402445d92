"""tools/from_slime_check.py on a checkout of our own making."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "from_slime_check.py"
FILES = {
    "examples/good/generate.py": (
        "from package_of_nobody import Tool\nfrom slime.utils.types import Sample\nfrom .helper import HELP\n"
        "async def generate(args, sample, sampling_params): return await Tool(sample)\n"
        "async def reward(args, sample, **kwargs): return 1.0\n"
    ),
    "examples/good/__init__.py": "",
    "examples/good/helper.py": "HELP = 1\n",
    "examples/bad/rollout.py": (
        "from slime.ray.rollout import RolloutManager\n"
        "def generate_rollout(args, rollout_id, data_buffer, evaluation=False): return []\n"
    ),
    "examples/fork/generate.py": (
        "from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput\n"
        "async def generate(input: GenerateFnInput): return GenerateFnOutput(samples=input.sample)\n"
    ),
    "examples/odd/generate.py": "def generate(args, sample, sampling_params): return sample\n",
    "examples/odd/prepare.py": "if __name__ == '__main__':\n    raise SystemExit(1)\n",
    "slime_plugins/models/mine.py": "def get_spec(args, config, vp_stage): return None\n",
    "slime/__init__.py": "raise RuntimeError('the checkout itself is not imported')\n",
}


def test_each_file_is_judged_with_its_reason(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(TOOL), "--slime", str(tmp_path), "--least", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert (
        "pass  examples/good/generate.py: generate (--custom-generate-function-path), reward (--custom-rm-path)" in said
    )
    assert "stand-ins for what is not installed: package_of_nobody" in said
    assert "fail  examples/bad/rollout.py: generate_rollout (--rollout-function-path)" in said
    assert "start the run with `fusionrl train`" in said
    assert "fail  examples/odd/generate.py" in said and "it is not async" in said
    assert "skip  examples/odd/prepare.py" in said
    assert "pass  slime_plugins/models/mine.py: get_spec (--spec)" in said
    assert "pass  examples/fork/generate.py: generate (--custom-generate-function-path)" in said
    assert "3 of 5 files with functions of flags pass; 4 of 6 files load" in said


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--slime", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "no folder examples" in done.stderr
