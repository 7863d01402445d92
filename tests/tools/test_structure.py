"""The limits on the sizes of files, functions and classes."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "structure.py"


def test_limits(tmp_path: Path) -> None:
    """The package is within them; a function that is too long is told."""
    (tmp_path / "long.py").write_text("class C:\n    def f(self):\n" + "        print()\n" * 90)
    commands = [[sys.executable, str(TOOL), "--limits", *folder] for folder in ([], [str(tmp_path)])]
    ours, long = (subprocess.run(command, capture_output=True, text=True) for command in commands)
    assert ours.returncode == 0, ours.stdout
    assert long.returncode == 1 and "over" in long.stdout and "long.py:2 f" in long.stdout
