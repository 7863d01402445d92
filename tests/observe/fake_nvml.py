"""The fake of NVIDIA's library, compiled: processes started with its environment load it in place of a driver's.

environment = fake_nvml(tmp_path)  # LD_LIBRARY_PATH
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("fake_nvml.c")


def fake_nvml(folder: Path) -> dict[str, str]:
    """Compile it into a folder. Returns the environment of a process that is to find it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, which makes a stand-in for the driver's library")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}
