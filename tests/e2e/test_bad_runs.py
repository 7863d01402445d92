"""Mistakes that show only when a run runs: one clear message, the right exit code, nothing left behind."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.e2e.launch import run

pytestmark = pytest.mark.e2e


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def test_a_reward_that_raises(rl_flags: list[str], tmp_path: Path) -> None:
    """The message names the flag, the function, the error and the sample."""
    flags = [*rl_flags, "--custom-rm-path", "tests/e2e/hooks.py:raising", "--num-rollout", "1"]
    launched = run([*flags, "--run-dir", str(tmp_path / "run")], tmp_path, code=1)
    last = _last_lines(launched.output())
    assert "--custom-rm-path tests/e2e/hooks.py:raising" in last and "KeyError: 'answer'" in last and "sample" in last


def test_an_engine_that_does_not_come_up(rl_flags: list[str], tmp_path: Path) -> None:
    """The end of the server's log is in the message."""
    flags = [
        *rl_flags,
        "--num-rollout",
        "1",
        "--sglang-context-length",
        "9999999",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    launched = run(flags, tmp_path, code=1)
    last = _last_lines(launched.output(), 40)
    assert "engine-0.log" in last and "context" in last.lower()


def test_a_truncated_checkpoint(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """A safetensors file that was cut off is a user's mistake that names the file."""
    broken = tmp_path / "model"
    shutil.copytree(task / "model", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    flags = [
        *rl_flags,
        "--hf-checkpoint",
        str(broken),
        "--num-rollout",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    launched = run(flags, tmp_path, code=2)
    assert "model.safetensors" in _last_lines(launched.output())


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
