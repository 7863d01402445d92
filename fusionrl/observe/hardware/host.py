"""Host memory of processes, and the CPUs near a process's GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from fusionrl.observe.hardware.nvml import Device

_KIB = 1024


def resident_bytes(pid: int, *, with_children: bool = False) -> int:
    """Resident memory of a process, with that of its descendants; 0 of one that is gone."""
    try:
        root = psutil.Process(pid)
        processes = [root, *(root.children(recursive=True) if with_children else [])]
    except psutil.Error:
        return 0
    return sum(map(_resident, processes))


def peak_bytes(pid: int) -> int:
    """The most resident memory that the process ever had; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * _KIB for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


logger = logging.getLogger(__name__)

_FEWEST_CPUS = 4
_MOST_NODES = 16  # NUMA nodes of a machine: a smaller share means CPUs that were chosen far from the GPU


def bind_near(devices: Sequence[Device]) -> tuple[int, ...]:
    """Bind this process, and the children that it will have, to CPUs near any of these GPUs. Returns them.

    It never gets a CPU that it did not have: a scheduler, a container or `taskset` may have given it some. Where none
    of these is near, or so few that the process would be slower for it, or nobody knows which are, nothing changes, and
    the result is empty.
    """
    near = {cpu for device in devices for cpu in device.cpus()}
    allowed = os.sched_getaffinity(0)
    chosen = near & allowed
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
