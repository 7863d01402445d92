"""Numbers of one process of a run, a trainer's or an engine's, and of the GPUs that it has."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from fusionrl.observe.hardware.affinity import bind_near
from fusionrl.observe.hardware.host import peak_bytes, resident_bytes
from fusionrl.observe.hardware.meter import Meter
from fusionrl.observe.hardware.nvml import Device, open_nvml
from fusionrl.observe.spans import count
from fusionrl.plan.visible_devices import VARIABLE, visible_names

HOST, HOST_PEAK = "host_bytes", "host_peak_bytes"


class ProcessHardware:
    """Made in the process itself, before it starts threads or children that are to be bound."""

    def __init__(self, ordinals: Sequence[int], *, binds: bool, with_children: bool) -> None:
        """
        Args:
            ordinals: GPUs as this process numbers them; none on a CPU.
            binds: bind it to the CPUs that are near them.
            with_children: its host memory is that of its descendants, too.
        """
        self._devices = devices_of(ordinals)
        self._with_children = with_children
        self.cpus = bind_near(self._devices) if binds else ()
        """CPUs to which it is bound; empty: it was left as it was."""
        self._meter = Meter(self._devices)

    def facts(self) -> dict[str, object]:
        """Return what does not change in a run."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpus": [device.inventory().as_json() for device in self._devices],
            "bound_to_cpus": list(self.cpus),
        }

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call; of host memory, those of now and the peak."""
        memory = {HOST: float(resident_bytes(os.getpid(), with_children=self._with_children))}
        if not self._with_children:
            memory[HOST_PEAK] = float(peak_bytes(os.getpid()))
        return memory | self._meter.take()


def record_host_memory(numbers: dict[str, float]) -> dict[str, float]:
    """Return the numbers of a process as they are; its host memory is a curve of the timeline from now on."""
    count("host memory", gib=numbers[HOST] / 2**30)
    return numbers


def devices_of(ordinals: Sequence[int]) -> list[Device]:
    """Return GPUs by the numbers that this process has for them; none where NVML is not there."""
    nvml = open_nvml() if ordinals else None
    if nvml is None:
        return []
    names = visible_names(os.environ.get(VARIABLE))
    if names is None:
        return nvml.devices([str(one) for one in ordinals])
    return nvml.devices([names[one] for one in ordinals if one < len(names)])


def memory_of_torch(ordinal: int) -> dict[str, float]:
    """The most memory that torch had allocated, and had reserved, on a GPU since the last call."""
    import torch

    found = {
        "memory_peak_bytes": float(torch.cuda.max_memory_allocated(ordinal)),
        "memory_reserved_bytes": float(torch.cuda.max_memory_reserved(ordinal)),
    }
    torch.cuda.reset_peak_memory_stats(ordinal)
    return found
