"""The GPUs of this machine, as far as CUDA_VISIBLE_DEVICES shows them. The driver's library is a fake."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from fusionrl.cli.device import detect_device
from fusionrl.plan.devices import Gpu, countable, locate, nth, refuse_slices, this_machine, visible_names


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs: a big one, and a small one that is cut into slices."""
    sizes = {0: 80, 1: 24, "MIG-x": 10, "GPU-small": 24}
    memory = {handle: SimpleNamespace(total=gib * 2**30) for handle, gib in sizes.items()}
    answers = {"Init": lambda: None, "Shutdown": lambda: None, "DeviceGetCount": lambda: 2}
    answers |= {"DeviceGetHandleByIndex": {0: 0, 1: 1}.__getitem__, "DeviceGetName": lambda handle: f"device {handle}"}
    answers |= {"DeviceGetHandleByUUID": {"MIG-x": "MIG-x", "GPU-small": 1}.__getitem__}
    for name, answer in (answers | {"DeviceGetMemoryInfo": memory.__getitem__}).items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


@pytest.mark.parametrize(
    ("value", "gib"), [(None, 80), ("0,1", 80), ("1", 24), ("GPU-small", 24), ("MIG-x", 10), (" 1 ,0", 24)]
)
def test_memory_is_that_of_the_first_visible_gpu(value, gib, driver, monkeypatch):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert this_machine("cuda").device_memory == gib * 2**30
    assert detect_device("auto") == detect_device("cuda") == "cuda"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_do_not_count(value, driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert detect_device("auto") == "cpu"
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={value} hides every GPU"):
        detect_device("cuda")


def test_a_machine_without_a_gpu(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("value", "names", "count"),
    [
        (None, None, None),
        ("", (), None),
        ("-1", (), None),
        (" 3 , 1", ("3", "1"), None),
        ("2,-1,3", ("2",), None),  # CUDA reads no further than what is no GPU
        ("GPU-8932f937,GPU-1a", ("GPU-8932f937", "GPU-1a"), 2),
        ("MIG-GPU-8932/1/0,MIG-77", ("MIG-GPU-8932/1/0", "MIG-77"), 2),
    ],
)
def test_lists(value, names, count):
    assert visible_names(value) == names
    assert countable(value) == count


@pytest.mark.parametrize(
    ("value", "name", "gpu"),
    [
        (None, "5", Gpu(5, 5)),
        # The machine's GPU 3 is the first that a process sees: `set_device(3)` would fail.
        ("3,1", "3", Gpu(0, 0)),
        ("3,1", "1", Gpu(1, 1)),
        (" 3 , 1", " 1", Gpu(1, 1)),  # Ray keeps the blanks
        ("GPU-b,GPU-a", "GPU-a", Gpu(1, 1)),
        # A process sees one slice of several alone.
        ("MIG-b,MIG-a", "MIG-a", Gpu(1, 0, "MIG-a")),
        ("MIG-GPU-8932/1/0", "MIG-GPU-8932/1/0", Gpu(0, 0, "MIG-GPU-8932/1/0")),
    ],
)
def test_places(value, name, gpu):
    assert locate(value, name) == gpu
    assert gpu.environment == ({} if gpu.alone is None else {"CUDA_VISIBLE_DEVICES": name})


def test_a_gpu_named_twice_and_one_that_cuda_does_not_see():
    for value in ("1,1", "0,00", "GPU-a,GPU-b,GPU-a"):
        with pytest.raises(ValueError, match="named twice"):
            visible_names(value)
    for value, name in (("3,1", "0"), ("2,-1,3", "3"), ("", "0"), ("GPU-a", "GPU-b")):
        with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={value}: Ray gives out the GPU '{name}'"):
            locate(value, name)


def test_a_run_without_ray_takes_the_list_from_its_begin():
    assert [nth(value, 1) for value in (None, "6,7", "GPU-b,MIG-a")] == [Gpu(1, 1), Gpu(1, 1), Gpu(1, 0, "MIG-a")]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=6,7: it names 2 GPUs, and the run needs GPU 2"):
        nth("6,7", 2)


def test_slices_are_not_connected():
    slices, whole = [Gpu(0, 0, "MIG-a"), Gpu(1, 0, "MIG-b")], [Gpu(0, 0), Gpu(1, 1)]
    refuse_slices(whole, 2, 2, "broadcast")
    refuse_slices(slices, 1, 1, "ipc")
    refused = {(2, 1, "ipc"): "--actor-num-gpus-per-node: 2 trainers", (1, 2, "ipc"): "--rollout-num-gpus-per-engine 2"}
    for values, flag in (refused | {(1, 1, "broadcast"): "--update-weight-transport broadcast"}).items():
        with pytest.raises(ValueError, match=f"{flag}.*MIG"):
            refuse_slices(slices, *values)
