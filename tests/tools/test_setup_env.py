"""setup-env.sh: clear errors, and nothing done for mistakes. (Its installing is tested by every CI run.)"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts/setup-env.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("exmaples",), {}, "exmaples"),
        ((), {"FUSIONRL_ENV": "tpu"}, "FUSIONRL_ENV=tpu"),
        ((), {"PYTHON": "/no/such/python", "FUSIONRL_ENV": "cpu"}, "PYTHON=/no/such/python"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    done = run(*arguments, FUSIONRL_VENV=str(tmp_path / "venv"), **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def test_pip_failure_shows_the_end_of_its_log(tmp_path: Path) -> None:
    # An index that does not exist and no other source: pip fails at the first package, after .venv was made.
    done = run(
        FUSIONRL_VENV=str(tmp_path / "venv"),
        FUSIONRL_ENV="cpu",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 1
    assert "No matching distribution" in done.stderr
    assert "install.log" in done.stderr
    assert not list((tmp_path / "venv").glob(".stamp*"))


@pytest.mark.skipif(not (ROOT / ".venv/.stamp-base").exists(), reason="this checkout's tests run in another .venv")
def test_a_second_call_does_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").glob(".stamp*")}
    start = time.perf_counter()
    done = run(FUSIONRL_ENV=(ROOT / ".venv/.kind").read_text().strip(), PYTHON="")
    seconds = time.perf_counter() - start
    assert done.returncode == 0
    assert "up to date" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (ROOT / ".venv").glob(".stamp*")} == before
    assert seconds < 30  # about 0.1 s; an installation takes longer than this even from a warm cache
