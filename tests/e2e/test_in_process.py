"""A whole run in one process, in a terminal: a breakpoint in a user's reward and in the loss stops there."""

import os
import pty
import re
import select
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.e2e.launch import TOKEN_VARIABLE, Launched, metrics_of

pytestmark = pytest.mark.e2e

HOOKS = """
import threading
_first = {"reward", "loss"}

def _stop(name):
    if name in _first:
        _first.discard(name)
        return True

def reward(args, sample, **kw):
    if _stop("reward"):
        breakpoint()
    return float(sample.response.strip() == str(sample.label))

def loss(args, batch, logits, sum_of_sample_mean):
    if _stop("loss"):
        breakpoint()
    return logits.float().pow(2).mean() * 1e-3, {}
"""


class Terminal:
    """A command in a pseudo-terminal, as a person types to it."""

    def __init__(self, command: list[str], token: str) -> None:
        self._fd, theirs = pty.openpty()
        env = {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "1"}
        root = Path(__file__).parents[2]
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(command, env=env, cwd=root, start_new_session=True, **streams)
        os.close(theirs)
        self.text = ""

    def expect(self, pattern: str, timeout_s: float = 180.0) -> str:
        """Read until `pattern`; return what came before its end, and forget it."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.text[-3000:]}"
            if select.select([self._fd], [], [], 0.5)[0]:
                try:
                    self.text += os.read(self._fd, 1 << 16).decode(errors="replace")
                except OSError:  # the command has ended
                    assert re.search(pattern, self.text), f"it ended before {pattern!r}:\n{self.text[-3000:]}"
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


def test_breakpoints_stop_in_the_terminal(rl_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOOKS)
    flags = [*rl_flags, "--custom-rm-path", f"{tmp_path}/mine.py:reward", "--num-rollout", "1", "--no-save"]
    flags += ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{tmp_path}/mine.py:loss"]
    flags += ["--in-process", "--run-dir", str(tmp_path / "run")]
    token = uuid.uuid4().hex
    terminal = Terminal([sys.executable, "-m", "tests.warm_start", "train", *flags], token)
    terminal.expect(r"\(Pdb\) ")
    terminal.type("p 'label', sample.label, threading.active_count() > 1")
    assert "('label', " in terminal.expect(r"True\)\s+\(Pdb\) ")
    terminal.type("c")
    terminal.expect(r"training")
    terminal.expect(r"\(Pdb\) ")
    terminal.type("p 'shape', tuple(logits.shape)")
    terminal.expect(r"\('shape', \(1, \d+, \d+\)\)\s+\(Pdb\) ")
    terminal.type("c")
    terminal.expect(r"done: ")
    launched = Launched(terminal.process, tmp_path / "none", token)  # type: ignore[arg-type]  # bytes, not text
    assert terminal.process.wait(180) == 0
    launched.assert_nothing_left()
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["step"] == 1 and "train/loss" in rows[-1]
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert not any(name.startswith(("trainer", "buffer", "ray")) for name in logs), logs
