"""Control groups that bound the memory of this process: a container's, a scheduler's job's, a service's.

Functions take `root`, below which /proc and /sys are read: "/" but in tests.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_GIB = 2**30
_NO_LIMIT = 2**62  # version 1 writes the largest number of pages where there is no limit


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a limit."""

    folder: Path
    limit: float  # bytes that its processes may use together
    used: float  # bytes that they use now, files that the kernel would give up not counted


def group_chains(root: Path = ROOT) -> list[list[Path]]:
    """Return folders of this process's memory group and those above it, the innermost first, for each hierarchy.

    Version 2 has one hierarchy, version 1 one for memory, and a machine may have both.
    """
    try:
        memberships = [
            line.split(":", 2) for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        ]
        mounts = [
            line.split() for line in (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        ]
    except OSError:
        return []
    chains = []
    for fields in mounts:
        dash = fields.index("-")
        kind, options, top, place = fields[dash + 1], fields[dash + 3].split(","), fields[3], fields[4]
        for _, controllers, path in memberships:
            is_it = kind == "cgroup2" and not controllers
            is_it |= kind == "cgroup" and "memory" in options and "memory" in controllers.split(",")
            if is_it and (path + "/").startswith(top.rstrip("/") + "/"):
                mount = root / place.lstrip("/")
                group = mount / path[len(top.rstrip("/")) :].lstrip("/")
                chains.append([group, *(above for above in group.parents if above.is_relative_to(mount))])
    return chains


def limited_groups(root: Path = ROOT) -> list[MemoryGroup]:
    """Return the groups of this process that have a limit."""
    groups = []
    for folder in _folders(root):
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = kernel_number(folder / most), kernel_number(folder / now)
            if limit is not None and limit < _NO_LIMIT:
                # Usage is with the groups below. Version 1 has rows for a group alone, and total_ ones that fit to it.
                rows = (_row(folder / "memory.stat", name) for name in ("total_inactive_file", "inactive_file"))
                cached = next((row for row in rows if row is not None), 0.0)
                groups.append(MemoryGroup(folder, limit, max(0.0, (used or 0.0) - cached)))
    return groups


def num_memory_kills(root: Path = ROOT) -> int:
    """Return the number of processes of this process's own group that the kernel has killed for want of memory.

    Not those of groups below it: the sandbox puts programs there that may take what they like. The kernel kills where
    a group's limit is reached, or where the machine has no memory left: this number does not tell which.
    """
    files = [chain[0] / name for chain in group_chains(root) for name in ("memory.events.local", "memory.oom_control")]
    return int(sum(_row(file, "oom_kill") or 0.0 for file in files))


class MemoryKills:
    """Says that the kernel has killed processes for want of memory since this object was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root, self._before, self._since = root, num_memory_kills(root), time.strftime("%d %b %H:%M")

    def sentence(self) -> str:
        """Return the kills, the limit and the cure; "" without kills or without a counter."""
        number = num_memory_kills(self._root) - self._before
        if number < 1:
            return ""
        killed = "a process" if number == 1 else f"{number} processes"
        place, cure = "the machine", "use fewer processes, or a machine with more"
        if groups := limited_groups(self._root):  # the kernel does not tell whether the group or the machine was full
            least = min(groups, key=lambda group: group.limit)
            place = f"its control group (limit {least.limit / _GIB:.1f} GiB, {least.folder}) or of {place}"
            cure = f"raise the limit of the container or job, {cure}"
        return (
            f"Since {self._since} the kernel of {socket.gethostname()} has killed {killed} of this run or of its"
            f" control group, because the memory of {place} was full: {cure}; `fusionrl plan` estimates what a run"
            " takes, and hardware/host_bytes/… in metrics.jsonl is what it took"
        )


_LITTLE = 2**26  # bytes of /dev/shm, and a sixteenth of it: Ray writes objects in pieces of megabytes


def shared_memory_sentence(root: Path = ROOT) -> str:
    """Return that /dev/shm is nearly full, what follows and the cure; "" where it has room, or is not there."""
    try:
        stats = os.statvfs(root / "dev/shm")
    except OSError:
        return ""
    free, size = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    if free >= min(_LITTLE, size / 16):
        return ""
    return (
        f"/dev/shm of {socket.gethostname()} has {free / 2**20:.0f} MiB free of {size / _GIB:.1f} GiB, and Ray keeps"
        " the run's objects there: the kernel kills (SIGBUS) who writes to one without room. Look at `ls -l /dev/shm`"
        " for files of other programs; give it more (`mount -o remount,size=16g /dev/shm`; docker run --shm-size=16g)"
    )


def _folders(root: Path) -> list[Path]:
    """Return the folders of all groups that may have a limit for this process."""
    default_folders = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]  # where the files of /proc cannot be read
    return list(dict.fromkeys([folder for chain in group_chains(root) for folder in chain] + default_folders))


def kernel_number(path: Path) -> float | None:
    """Return the number in a file of the kernel's; None: not there, or "max"."""
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _row(path: Path, name: str) -> float | None:
    try:
        rows = dict(line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
        return float(rows[name])
    except (OSError, ValueError, KeyError):
        return None
