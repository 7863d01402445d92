"""The device of this machine, found without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from fusionrl.base.quiet import quiet


def detect_device(wanted: str) -> Literal["cpu", "cuda"]:
    """`cpu` or `cuda`; auto asks NVML, which costs milliseconds where torch costs seconds.

    Raises:
        ValueError: --device cuda on a machine without a GPU.
    """
    if wanted == "cpu":
        return "cpu"
    try:
        with quiet():
            import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except ImportError:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False) if _has("nvidia-smi") else None
        count = len(listed.stdout.splitlines()) if listed is not None and listed.returncode == 0 else 0
    except pynvml.NVMLError:
        count = 0
    if wanted == "cuda" and not count:
        raise ValueError("--device cuda: this machine has no NVIDIA GPU; use --device cpu or auto")
    return "cuda" if count else "cpu"


def _has(program: str) -> bool:
    return any(os.access(Path(folder) / program, os.X_OK) for folder in os.get_exec_path())
