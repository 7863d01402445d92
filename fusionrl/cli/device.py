"""The device of this machine, found without torch."""

import os
import shutil
import subprocess
from typing import Literal

from fusionrl.base.imports import quiet
from fusionrl.plan.devices import VARIABLE, visible_names


def detect_device(device: str) -> Literal["cpu", "cuda"]:
    """`cpu` or `cuda`; auto asks NVML, which costs milliseconds where torch costs seconds.

    GPUs that CUDA_VISIBLE_DEVICES hides do not count: NVML shows them, too. Raises ValueError for --device cuda on a
    machine without a GPU, or with all of them hidden.
    """
    if device == "cpu":
        return "cpu"
    try:
        with quiet():
            import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except ImportError:
        program = shutil.which("nvidia-smi")
        listed = subprocess.run([program, "-L"], capture_output=True, check=False) if program else None
        count = len(listed.stdout.splitlines()) if listed is not None and listed.returncode == 0 else 0
    except pynvml.NVMLError:
        count = 0
    hidden = os.environ.get(VARIABLE)
    if count and visible_names(hidden) == ():
        count = 0
        if device == "cuda":
            raise ValueError(f"--device cuda: {VARIABLE}={hidden} hides every GPU; unset it, or use --device cpu")
    if device == "cuda" and not count:
        raise ValueError("--device cuda: this machine has no NVIDIA GPU; use --device cpu or auto")
    return "cuda" if count else "cpu"
