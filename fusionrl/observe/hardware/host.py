"""Host memory of processes. Pages that processes share count for each of them, as in `ps`."""

from __future__ import annotations

from pathlib import Path

import psutil

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
