"""`Meter`: what the GPUs of a process did since it was asked last. A thread looks at them once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from statistics import fmean

from fusionrl.observe.hardware.nvml import Device, Reading
from fusionrl.observe.spans import count

EVERY_S = 1.0
_COMBINED: dict[str, Callable[[list[float]], float]] = {
    "utilisation": fmean,
    "power_w": fmean,
    "memory_used_bytes": max,
    "temperature_c": max,
    "ecc_errors": max,
}


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
