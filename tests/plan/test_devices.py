"""The GPUs of this machine, as far as CUDA_VISIBLE_DEVICES shows them. The driver's library is a fake."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from fusionrl.cli.device import detect_device
from fusionrl.plan.devices import this_machine


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs: a big one, and a small one that is cut into slices."""
    sizes = {0: 80, 1: 24, "MIG-x": 10, "GPU-small": 24}
    memory = {handle: SimpleNamespace(total=gib * 2**30) for handle, gib in sizes.items()}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", {0: 0, 1: 1}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"MIG-x": "MIG-x", "GPU-small": 1}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"device {handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory.__getitem__)


@pytest.mark.parametrize(
    ("value", "gib"), [(None, 80), ("0,1", 80), ("1", 24), ("GPU-small", 24), ("MIG-x", 10), (" 1 ,0", 24)]
)
def test_memory_is_that_of_the_first_visible_gpu(value, gib, monkeypatch):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert this_machine("cuda").device_memory == gib * 2**30
    assert detect_device("auto") == detect_device("cuda") == "cuda"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_do_not_count(value, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert detect_device("auto") == "cpu"
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={value} hides every GPU"):
        detect_device("cuda")


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect_device("auto") == "cpu"
    with pytest.raises(ValueError, match="--device cuda: this machine has no NVIDIA GPU"):
        detect_device("cuda")


def test_without_nvml_the_drivers_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_device("auto") == "cpu"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: a big one'\n")
    program.chmod(0o700)
    assert detect_device("auto") == "cuda"
