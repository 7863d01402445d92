"""Code that needs a process of its own: its imports, or what it puts into libraries, are for good."""

from __future__ import annotations

import subprocess
import sys


def assert_runs(code: str) -> None:
    """Run `code` in a new interpreter; fail with its error where it fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
