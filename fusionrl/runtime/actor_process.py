"""The process of an actor: its settings, log, clock and hardware; and that of an engine's actor, `EngineWorker`.

Everything a process prints, C++ libraries included, lands in the actor's log file in the run's folder. An engine's
actor imports nothing of the Buffer and the trainers.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusionrl.base.environment import take_secrets
from fusionrl.base.process import answer_with_stacks, raise_open_files
from fusionrl.base.sockets import collective_interfaces
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.observe.hardware import Device, Meter, bind_near, open_nvml, peak_bytes, resident_bytes
from fusionrl.observe.logs import setup_logging, write_whole_lines
from fusionrl.observe.spans import clock, count, record_beside
from fusionrl.plan.devices import VARIABLE, visible_names

HOST, HOST_PEAK = "host_bytes", "host_peak_bytes"


@dataclass(frozen=True)
class ProcessSettings:
    """Settings that an actor's process takes over before anything else: the rights of its files, and secrets."""

    umask: int
    hook_secrets: dict[str, str] = field(default_factory=dict, repr=False)
    host: str | None = None  # the address of its node; its interface is looked up there, as no other node can
    environment: dict[str, str] = field(default_factory=dict)
    numa_affinity: bool = False  # it is bound to the CPUs near its GPUs, once it starts what uses them

    def apply(self) -> None:
        """Take it over. On a cluster that the run has joined, the process has the environment of that cluster."""
        os.umask(self.umask)
        os.environ.update(self.environment)  # before torch is imported, which reads its number of threads once
        raise_open_files()
        take_secrets(self.hook_secrets)
        if self.host is not None:
            os.environ.update(collective_interfaces(self.host, os.environ))


class ActorProcess:
    """Answers the driver's questions to every actor's process: its clock (see `telemetry`), and its devices."""

    _hardware: ProcessHardware | None = None

    def clock(self) -> tuple[str, int]:
        """Return the machine's boot and its monotonic clock, ns."""
        return clock()

    def hardware_facts(self) -> dict[str, object]:
        """Return what does not change in a run."""
        return {} if self._hardware is None else self._hardware.facts()


def log_to(path: str, role: str, level: str = "info") -> None:
    """Let the process write to the file `path`, which is made where it is not there; its spans go to the timeline."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    write_whole_lines()
    setup_logging(level, Path(path), role=role)
    answer_with_stacks()
    record_beside(path)


METRICS = """
hardware/host_peak_bytes/<group> | bytes | The most resident host memory that one process of the group ever had
    (trainers).
hardware/memory_peak_bytes/<group> | bytes | The most memory that torch had allocated on a GPU since the step before,
    of the rank with the most. | trainers on GPUs
hardware/memory_reserved_bytes/<group> | bytes | The most memory that torch had reserved on a GPU since the step
    before, of the rank with the most. | trainers on GPUs
"""


class ProcessHardware:
    """Made in the process itself, before it starts threads or children that are to be bound."""

    def __init__(self, ordinals: Sequence[int], *, binds: bool) -> None:
        """`ordinals`: GPUs as this process numbers them, none on a CPU. `binds`: to the CPUs that are near them."""
        self._devices = devices_of(ordinals)
        self.cpus = bind_near(self._devices) if binds else ()
        """CPUs to which it is bound; empty: it was left as it was."""
        self._meter = Meter(self._devices)

    def facts(self) -> dict[str, object]:
        """Return what does not change in a run."""
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpus": [device.inventory() for device in self._devices],
            "bound_to_cpus": list(self.cpus),
        }

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call; of host memory, those of now and the peak."""
        memory = {HOST: float(resident_bytes(os.getpid())), HOST_PEAK: float(peak_bytes(os.getpid()))}
        return memory | self._meter.take()


def record_host_memory(numbers: dict[str, float]) -> dict[str, float]:
    """Return the numbers unchanged, and add the host memory to the timeline."""
    count("host memory", gib=numbers[HOST] / 2**30)
    return numbers


def devices_of(ordinals: Sequence[int]) -> list[Device]:
    """Return GPUs by the numbers that this process has for them; none where NVML is not there."""
    nvml = open_nvml() if ordinals else None
    if nvml is None:
        return []
    names = visible_names(os.environ.get(VARIABLE))
    if names is None:
        return nvml.devices([str(ordinal) for ordinal in ordinals])
    return nvml.devices([names[ordinal] for ordinal in ordinals if ordinal < len(names)])


def memory_of_torch(ordinal: int) -> dict[str, float]:
    """The most memory that torch had allocated, and had reserved, on a GPU since the last call."""
    import torch

    peaks = {
        "memory_peak_bytes": float(torch.cuda.max_memory_allocated(ordinal)),
        "memory_reserved_bytes": float(torch.cuda.max_memory_reserved(ordinal)),
    }
    torch.cuda.reset_peak_memory_stats(ordinal)
    return peaks


class EngineWorker(ActorProcess, EngineActor):
    """An engine's actor process."""

    def __init__(self, spec: EngineSpec, log: str, settings: ProcessSettings) -> None:
        settings.apply()
        log_to(log, spec.log_name.removesuffix(".log"))
        self._binds = settings.numa_affinity
        super().__init__(spec)

    def start(self) -> str:
        """Start the server on CPUs near its GPUs: it inherits those of this thread."""
        self.open_hardware()
        return super().start()

    def open_hardware(self) -> None:
        """Find the devices, and take CPUs near them."""
        if self._hardware is None:
            ordinals = self.spec.gpu_ids if self.spec.device == "cuda" else ()
            self._hardware = ProcessHardware(ordinals, binds=self._binds)

    def hardware(self) -> dict[str, float]:
        """Return the numbers of its devices since the last call, and the host memory of its server."""
        if self._hardware is None or self._server is None:
            return {}
        numbers = self._hardware.take()
        numbers.pop(HOST_PEAK)  # of this process; the server's is its own
        return record_host_memory(
            numbers | {HOST: numbers[HOST] + resident_bytes(self._server.pid, with_children=True)}
        )
