"""GPUs by NVIDIA's management library (nvidia-ml-py): inventory, readings, near CPUs; host memory of processes.

What a driver or a card does not support is None, never an error: a laptop's card counts no memory errors, a slice of a
GPU (MIG) has no utilisation. Without a driver there is no `Nvml`, and a run continues without its numbers.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import psutil

from fusionrl.observe.spans import count

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MOST_LINKS = 18  # NVLink, of a GPU
_BITS = 64
# Reasons for which a card runs slower than it could; not "idle" or a clock that a user set.
_SLOWED_BY = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """One look at a GPU."""

    utilisation: float | None  # share of the last moments in which a kernel ran, 0..1
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    slowed_by: tuple[str, ...] = ()  # reasons for which it runs slower than it could
    ecc_errors: int | None = None  # uncorrected memory errors since the driver was loaded


class Device:
    """One GPU, or slice of one. Made by `Nvml`."""

    def __init__(self, nvml: Any, handle: Any, driver: str) -> None:
        self._nvml, self._handle, self._driver = nvml, handle, driver
        self._ask: Callable[[Callable[[], Any]], Any] = partial(ask, nvml)

    def inventory(self) -> dict[str, object]:
        """Return what does not change in a run: name, memory, links that are up, CPUs of its NUMA node, …."""
        nvml, card = self._nvml, self._handle
        links = [self._ask(partial(nvml.nvmlDeviceGetNvLinkState, card, link)) for link in range(_MOST_LINKS)]
        return {
            "name": self._ask(lambda: nvml.nvmlDeviceGetName(card)) or "",
            "uuid": self._ask(lambda: nvml.nvmlDeviceGetUUID(card)) or "",
            "driver": self._driver,
            "memory_bytes": self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(card).total)),
            "num_nvlinks": sum(link == 1 for link in links),
            "ecc": self._ask(lambda: bool(nvml.nvmlDeviceGetEccMode(card)[0])),
            "cpus": self.cpus(),
            "power_limit_w": self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000),
        }

    def reading(self) -> Reading:
        """Ask the driver now; a value that it does not give is None."""
        nvml, card = self._nvml, self._handle
        sensor, kind = nvml.NVML_TEMPERATURE_GPU, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)) or 0
        return Reading(
            utilisation=self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100),
            memory_used_bytes=self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(card).used)),
            power_w=self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
            temperature_c=self._ask(lambda: float(nvml.nvmlDeviceGetTemperature(card, sensor))),
            slowed_by=tuple(name for bit, name in _SLOWED_BY.items() if reasons & bit),
            ecc_errors=self._ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(card, kind, nvml.NVML_VOLATILE_ECC))),
        )

    def process_ids(self) -> list[int]:
        """Return the processes that compute on it, as far as this one sees them."""
        running = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or ()
        return [process.pid for process in running]

    def cpus(self) -> tuple[int, ...]:
        """The numbers of the CPUs of its NUMA node; none where they are unknown."""
        num_words = max(1, -(-(os.cpu_count() or 1) // _BITS))
        words = self._ask(lambda: self._nvml.nvmlDeviceGetCpuAffinity(self._handle, num_words)) or ()
        return tuple(_BITS * i + bit for i, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1)


class Nvml:
    """The library, loaded. `open_nvml` makes it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.driver: str = ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""

    def devices(self, names: Sequence[str] | None = None) -> list[Device]:
        """Return GPUs by names of CUDA_VISIBLE_DEVICES that are there (numbers, UUIDs); None: all of the machine."""
        nvml = self._nvml
        if names is None:
            names = [str(index) for index in range(ask(nvml, nvml.nvmlDeviceGetCount) or 0)]
        devices = [ask(nvml, partial(self.device, name)) for name in names]
        return [device for device in devices if device is not None]

    def device(self, name: str) -> Device:
        """Return one GPU by its name; raises the library's NVMLError where it is not there."""
        find = self._nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else self._nvml.nvmlDeviceGetHandleByUUID
        return Device(self._nvml, find(int(name) if name.isdigit() else name), self.driver)


@cache
def open_nvml() -> Nvml | None:
    """Load the library, once a process. None: no package, no driver, or no GPU that this process may see."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no numbers of GPUs: %s", error)
        return None
    return Nvml(pynvml)


def ask(nvml: Any, function: Callable[[], T]) -> T | None:
    """Return what the library answers; None where the card or the driver does not support the question."""
    try:
        return function()
    except nvml.NVMLError as error:
        logger.debug("NVML: %s", error)
        return None


# ------------------------------------------------------------------------------------------------ the meter
EVERY_S = 1.0
_COMBINED: dict[str, Callable[[list[float]], float]] = {
    "utilisation": fmean,
    "power_w": fmean,
    "memory_used_bytes": max,
    "temperature_c": max,
    "ecc_errors": max,
}


METRICS = """
hardware/memory_used_bytes/<group> | bytes | The most memory in use on a GPU of the group, by any process, sampled
    every second since the last step. | NVIDIA GPUs
hardware/utilisation/<group> | share | Share of time in which a kernel ran, mean over the group's GPUs and the looks
    since the step before. | NVIDIA GPUs
hardware/power_w/<group> | watts | Power of a GPU, mean over the group and the looks. | NVIDIA GPUs
hardware/temperature_c/<group> | degrees Celsius | Of the hottest GPU of the group. | NVIDIA GPUs
hardware/slowed/<group> | share | Share of the looks in which a GPU ran slower than it could: power cap, heat, power
    brake. | NVIDIA GPUs
hardware/ecc_errors/<group> | errors | Uncorrected memory errors of the worst GPU since its driver was loaded. | GPUs
    with ECC
"""


class Meter:
    """Means of utilisation and power, and the largest memory and temperature, over GPUs and time.

    Without a GPU it has no thread and no numbers.
    """

    def __init__(self, devices: Sequence[Device], every_s: float = EVERY_S) -> None:
        self._devices, self._every_s = devices, every_s
        self._readings: list[Reading] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        if devices:
            threading.Thread(target=self._watch, name="meter", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        readings = [device.reading() for device in self._devices]
        with self._lock:
            self._readings += readings
        now = summary(readings)
        if "memory_used_bytes" in now:
            count("GPU memory", gib=now["memory_used_bytes"] / 2**30)
        if "utilisation" in now:
            count("GPU in use", share=now["utilisation"])

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call. Between two looks of the thread it looks itself."""
        if not self._devices:
            return {}
        if not self._readings:
            self.look()
        with self._lock:
            readings, self._readings = self._readings, []
        return summary(readings)

    def close(self) -> None:
        self._is_over.set()


def summary(readings: Sequence[Reading]) -> dict[str, float]:
    """Return the numbers of some readings; what no card supports is left out."""
    values: dict[str, float] = {}
    for name, combine in _COMBINED.items():
        known = [float(value) for reading in readings if (value := getattr(reading, name)) is not None]
        if known:
            values[name] = combine(known)
    if readings:
        values["slowed"] = fmean(bool(reading.slowed_by) for reading in readings)
    return values


# ------------------------------------------------------------------------------------------------ the host
def resident_bytes(pid: int, *, with_children: bool = False) -> int:
    """Resident memory of a process, with that of its descendants; 0 of one that is gone."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *(root.children(recursive=True) if with_children else [])]:
            with suppress(psutil.Error):  # it ended meanwhile
                total += int(process.memory_info().rss)
    return total


def peak_bytes(pid: int) -> int:
    """The most resident memory that the process ever had; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


_FEWEST_CPUS = 4
_MOST_NODES = 16  # NUMA nodes of a machine: a smaller share means CPUs that were chosen far from the GPU


def bind_near(devices: Sequence[Device]) -> tuple[int, ...]:
    """Bind this process, and the children that it will have, to CPUs near any of these GPUs. Returns them.

    It never gets a CPU that it did not have. Where too few of these are near, or it is unknown which are, nothing
    changes, and the result is empty.
    """
    allowed = os.sched_getaffinity(0)
    chosen = {cpu for device in devices for cpu in device.cpus()} & allowed
    is_few = len(chosen) < _FEWEST_CPUS or len(chosen) * _MOST_NODES < len(allowed)
    if is_few or chosen == allowed:
        return ()
    try:
        os.sched_setaffinity(0, chosen)
    except OSError as error:
        logger.warning("--numa-affinity: this process stays on all its CPUs: %s", error.strerror)
        return ()
    logger.info("bound to %d of %d CPUs, which are near its GPUs", len(chosen), len(allowed))
    return tuple(sorted(chosen))
