"""Processes of a test: code that needs one of its own, as its imports are for good, and waits for others."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fusionrl.runtime import guard


def assert_runs(code: str) -> None:
    """Run `code` in a new interpreter; fail with its error where it fails."""
    run_code(code)


def run_code(code: str, *argv: str, **variables: str) -> str:
    """Do that with arguments, and variables added to the environment; return what it prints."""
    command, environment = [sys.executable, "-c", code, *argv], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Wait until a condition holds; fail after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come to hold"
        time.sleep(0.02)


def lives(pid: int | str) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def carriers(token: str) -> list[int]:
    """Living processes whose environment, as they were started with it, has the token of a run."""
    return [pid for pid in guard._pids() if guard._carries(pid, token)]
