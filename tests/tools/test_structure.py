"""The limits on the sizes of files, functions and classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "structure.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), "--limits", *arguments], capture_output=True, text=True)


def test_the_package_is_within_its_limits() -> None:
    done = run()
    assert done.returncode == 0, done.stdout


def test_a_function_that_is_too_long_is_told(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("class C:\n    def f(self):\n" + "        print()\n" * 90)
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "over" in done.stdout and "long.py:2 f" in done.stdout
