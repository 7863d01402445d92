"""Mistakes that show only when a run runs: one clear message, the right exit code, nothing left behind.

A reward that raises: test_console.py. A checkpoint that is cut off: tests/models/test_hf_io.py.
"""

import socket
from pathlib import Path

import pytest

from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.launch import run

pytestmark = pytest.mark.e2e


def _last_lines(text: str, count: int = 16) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def test_files_beside_hooks_in_every_process(rl_flags: list[str], tmp_path: Path) -> None:
    """Each of three folders has a `helper.py` of its own: for the Buffer, the reward processes and the trainers.

    The loss raises in its helper, and the console shows that from a trainer as well.
    """
    run_dir, hooks = tmp_path / "run", tmp_path / "hooks"
    for name, (hook, helper) in BESIDE.items():
        (hooks / name).mkdir(parents=True)
        (hooks / name / "hook.py").write_text(hook)
        (hooks / name / "helper.py").write_text(helper)
    flags = [*rl_flags, "--num-rollout", "1", "--run-dir", str(run_dir), "--loss-type", "custom_loss"]
    for name, flag in {"a": "custom-generate-function", "b": "custom-rm", "c": "custom-loss-function"}.items():
        flags += [f"--{flag}-path", f"{hooks / name / 'hook.py'}:f"]
    launched = run(flags, tmp_path, code=1)
    (file,) = list_rollouts(run_dir, kind="train")
    rows = list(file.rows())
    assert all(row["metadata"]["note"] and row["reward"] == row["index"] % 4 for row in rows)
    last = _last_lines(launched.output())
    assert f"--custom-loss-function-path {hooks / 'c' / 'hook.py'}:f: ZeroDivisionError: division by zero\n" in last
    assert f'File "{hooks / "c" / "hook.py"}", line 2, in f\n' in last
    assert f'File "{hooks / "c" / "helper.py"}", line 2, in divide\n' in last
    assert f"in {file.path}\n" in last and "the samples that it was at: " in last
    assert "fusionrl/trainer/loss_hooks.py" in (run_dir / "logs" / "driver.log").read_text()


# What `a` makes is an object of a class in its helper; it travels to the reward processes and to the trainers.
BESIDE = {
    "a": (
        "from helper import Note\nfrom fusionrl.plugin_api import generate\nasync def f(args, sample, params):\n"
        "    sample = await generate(args, sample, params)\n    sample.metadata['note'] = Note(sample.index)\n"
        "    return sample\n",
        "class Note:\n    def __init__(self, index): self.index = index\n    def rest(self): return self.index % 4\n",
    ),
    "b": (
        "async def f(args, sample, **kwargs):\n    from helper import score\n    return score(sample)\n",
        "def score(sample): return float(sample.metadata['note'].rest())\n",
    ),
    "c": (
        "from .helper import divide\ndef f(args, batch, *_): return divide(batch['metadata'][0]['note'].rest())\n",
        "def divide(number):\n    return number / 0\n",
    ),
}


def test_an_engine_that_does_not_come_up(rl_flags: list[str], tmp_path: Path) -> None:
    """The console ends with the end of the server's log."""
    flags = [*rl_flags, "--num-rollout", "1", "--sglang-tokenizer-path", str(tmp_path / "nowhere")]
    launched = run([*flags, "--run-dir", str(tmp_path / "run")], tmp_path, code=1)
    last = _last_lines(launched.output(), 60)
    assert "engine-0.log" in last and "nowhere" in last


def test_a_router_port_in_use(rl_flags: list[str], tmp_path: Path) -> None:
    """A prometheus port that the user fixed and that is taken is named."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = [*rl_flags, "--num-rollout", "1", "--router-prometheus-port", str(port)]
        launched = run([*flags, "--run-dir", str(tmp_path / "run")], tmp_path, code=2)
    last = _last_lines(launched.output())
    assert str(port) in last and "--router-prometheus-port" in last
