"""Numbers of GPUs by the real nvidia-ml-py, of a library that is compiled here; and host memory of real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.observe import spans
from fusionrl.observe.hardware import Meter, Reading, peak_bytes, resident_bytes, summary
from fusionrl.runtime.actor_process import HOST, record_host_memory
from tests.own_process import run_code

ASKS = """
import json, os, sys
from dataclasses import asdict
from fusionrl.runtime.actor_process import ProcessHardware
from fusionrl.observe.hardware import Meter
from fusionrl.observe.hardware import open_nvml
nvml = open_nvml()
if nvml is None:
    print("null"), sys.exit()
bound = {}
os.sched_getaffinity = lambda pid: set(range(64))
os.sched_setaffinity = lambda pid, cpus: bound.update({os.environ["FAKE_NVML_CPUS"]: sorted(cpus)})
own = ProcessHardware([0], binds=True)
meter = Meter(nvml.devices(["GPU-aaaa"]), every_s=1000.0)
meter.look(), meter.look()
print(json.dumps({
    "all": [device.inventory() for device in nvml.devices()],
    "named": [device.inventory()["uuid"] for device in nvml.devices(["1", "GPU-aaaa", "GPU-cccc", "7"])],
    "reading": [asdict(device.reading()) for device in nvml.devices()],
    "meter": meter.take(),
    "facts": own.facts(),
}))
for os.environ["FAKE_NVML_CPUS"] in ("7", "ffffffffffffffff"):
    ProcessHardware([0], binds=True)
del os.environ["FAKE_NVML_CPUS"]
ProcessHardware([0], binds=True)
print(json.dumps(bound))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that finds a stand-in for the driver's library, compiled here."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("needs a C compiler for the driver library's stand-in")
    folder, source = tmp_path_factory.mktemp("nvml"), str(Path(__file__).with_name("fake_nvml.c"))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), source], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def answers(library: dict[str, str]) -> dict:
    """A process with two GPUs, of which it may see the second and then the first; the first is near CPUs 8 to 15."""
    shown = run_code(ASKS, **library, FAKE_NVML_CPUS="ff00", CUDA_VISIBLE_DEVICES="GPU-aaaa,1")
    facts, bound = map(json.loads, shown.splitlines())
    return facts | {"bound": bound}


def test_what_a_card_says(answers: dict) -> None:
    """And one that supports next to nothing is no error."""
    expected = {"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-aaaa", "driver": "570.12.01", "memory_bytes": 85 << 30}
    expected |= {"num_nvlinks": 17, "ecc": True, "cpus": list(range(8, 16)), "power_limit_w": 700.0}
    assert answers["all"][0] == expected
    reading = answers["reading"][0]
    assert reading["slowed_by"] == ["power cap", "hardware thermal slowdown"]  # and not that it is idle
    assert (reading["power_w"], reading["ecc_errors"]) == (650.0, 3)
    card, reading = answers["all"][1], answers["reading"][1]
    assert (card["name"], card["num_nvlinks"], card["ecc"], card["cpus"]) == ("NVIDIA GeForce GT 1030", 0, None, [])
    unknown = ("utilisation", "power_w", "temperature_c", "ecc_errors")
    assert {reading[name] for name in unknown} == {None} and reading["slowed_by"] == []
    assert answers["named"] == ["GPU-bbbb", "GPU-aaaa"]  # by number and by name; what is not there is left out


def test_a_process_knows_its_cards_and_is_bound_to_the_cpus_near_them(answers: dict) -> None:
    """A meter takes means of rates, and the largest of the rest."""
    expected = {"utilisation": 0.75, "power_w": 650.0, "memory_used_bytes": float(12 << 30)}
    assert answers["meter"] == expected | {"temperature_c": 62.0, "ecc_errors": 3.0, "slowed": 1.0}
    assert answers["facts"]["bound_to_cpus"] == list(range(8, 16))
    assert answers["bound"] == {"ff00": list(range(8, 16))}, "not to 3 CPUs of 64, nor to all, nor where it is unknown"
    assert [gpu["uuid"] for gpu in answers["facts"]["gpus"]] == ["GPU-aaaa"]


def test_a_driver_that_fails_is_no_gpu(library: dict[str, str]) -> None:
    """Without one there are no numbers."""
    assert run_code(ASKS, **library, FAKE_NVML_FAILS="1") == "null\n"
    assert Meter([]).take() == {}
    assert summary([Reading(None, None, None, None)]) == {"slowed": 0.0}


def test_host_memory_is_that_of_a_process_and_its_children() -> None:
    held = "b = bytes([1]) * (64 << 20); print(1); input()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        alone, together = resident_bytes(child.pid), resident_bytes(child.pid, with_children=True)
        child.stdin.write(b"\n")
    assert alone < 60 << 20 < together - alone
    assert resident_bytes(2**22 + 1) == 0
    assert peak_bytes(os.getpid()) >= 1 << 20 and peak_bytes(2**22 + 1) == 0


def test_memory_and_use_are_curves_of_the_timeline(tmp_path: Path) -> None:
    spans.record_to(tmp_path, "trainer-0", 1)
    try:
        device: Any = SimpleNamespace(reading=lambda: Reading(0.25, 3 << 30, 300.0, 60.0))
        meter = Meter([device], every_s=1000.0)
        meter.look()
        meter.close()
        assert record_host_memory({HOST: float(2 << 30)}) == {HOST: float(2 << 30)}
    finally:
        spans.stop_recording()
    lines = (tmp_path / "timeline" / "trainer-0.a1.jsonl").read_text().splitlines()[1:]
    assert {record[1]: record[3] for record in map(json.loads, lines)} == {
        "GPU memory": {"gib": 3.0},
        "GPU in use": {"share": 0.25},
        "host memory": {"gib": 2.0},
    }
