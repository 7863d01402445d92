"""The machine of a proof, and the sources: results of another machine, or of other sources, are not taken over."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fusionrl.cli.device import detect_device
from fusionrl.plan.devices import VARIABLE, visible_names

ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "sglang", "megatron-core", "ray", "transformer-engine", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that this process may use."""
    if detect_device("auto") == "cpu":
        return 0
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    names = visible_names(environ.get(VARIABLE))
    return count if names is None else min(count, len(names)) if all(name.isdigit() for name in names) else len(names)


def has_package(name: str) -> bool:
    """Return whether a module of that name could be imported."""
    return importlib.util.find_spec(name) is not None


def facts(rehearses: bool) -> dict[str, object]:
    """Names and versions: GPUs, driver, packages, and a hash of the sources."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, object] = {"gpus": [] if rehearses else _gpus(), "versions": versions, "sources": _sources()}
    return facts


def described(machine: Mapping[str, object]) -> str:
    """The GPUs in a few words."""
    gpus = machine["gpus"]
    assert isinstance(gpus, list)
    return f"{len(gpus)} x {gpus[0]}" if gpus else "a CPU (rehearsal)"


def _gpus() -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["GPU"] * count_gpus()


def _sources() -> str:
    digest = hashlib.sha256()
    for room in ("fusionrl", "tools", "tests"):  # the stages are tools and tests
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
