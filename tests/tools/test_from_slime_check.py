"""tools/from_slime_check.py on a checkout of our own making."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tools.conftest import Command
from tests.trainer.forked_program import ForkedProgram
from tools import from_slime_check

FILES = {
    "examples/good/generate.py": (
        "from package_of_nobody import Tool\nfrom slime.utils.types import Sample\nfrom . import helper\n"
        "async def generate(args, sample, sampling_params): return await Tool(sample)\n"
        "async def reward(args, sample, **kwargs): return 1.0\n"
    ),
    "examples/good/__init__.py": "",
    "examples/good/helper.py": "",
    "examples/bad/rollout.py": (
        "from slime.ray.rollout import RolloutManager\n"
        "def generate_rollout(args, rollout_id, data_buffer, evaluation=False): return []\n"
    ),
    "examples/odd/generate.py": "def generate(args, sample, sampling_params): return sample\n",
    "examples/odd/prepare.py": "if __name__ == '__main__':\n    raise SystemExit(1)\n",
    "slime_plugins/models/mine.py": (
        "from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput\n"
        "async def generate_of_a_fork(input: GenerateFnInput): return GenerateFnOutput(samples=input.sample)\n"
        "def get_spec(args, config, vp_stage): return None\n"
    ),
    "slime/__init__.py": "raise RuntimeError('the checkout itself is not imported')\n",
}


def test_each_file_is_judged_with_its_reason(
    forkserver: None, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a process of its own, here a fork that has torch already; a folder that is no checkout is refused."""
    code, said = command(from_slime_check.main, "--slime", tmp_path)
    assert code == 2 and "no folder examples" in said
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = Mock(side_effect=lambda command, **_: ForkedProgram(command[1:], tmp_path).wait(60))
    monkeypatch.setattr(from_slime_check.subprocess, "run", run)
    code, said = command(from_slime_check.main, "--slime", tmp_path, "--least", "3")
    assert code == 1
    for line in (
        "pass  examples/good/generate.py: generate (--custom-generate-function-path), reward (--custom-rm-path)\n",
        "stand-ins for what is not installed: package_of_nobody\n",
        "fail  examples/bad/rollout.py: generate_rollout (--rollout-function-path)\n",
        "start the run with `fusionrl train`",
        "fail  examples/odd/generate.py",
        "it is not async",
        "skip  examples/odd/prepare.py",
        "pass  slime_plugins/models/mine.py: generate_of_a_fork (--custom-generate-function-path), get_spec (--spec)\n",
        "2 of 4 files with functions of flags pass; 2 of 4 files load\n",
    ):
        assert line in said, said
