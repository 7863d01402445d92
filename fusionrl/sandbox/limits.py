"""Bounds of one run in the sandbox, its result, and the cgroup that bounds its memory where the kernel allows one."""

import errno
import functools
import itertools
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fusionrl.base.memory_groups import group_chains
from fusionrl.sandbox.launcher.watch import was_full


class SandboxError(RuntimeError):
    """The sandbox itself failed: it could not be set up, or it ended without a report."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one run; bytes and seconds. `num_processes` also counts threads, like RLIMIT_NPROC."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and memory of all of them together with the files that they write."""
    output_bytes: int = 64 << 10
    """Of stdout and of stderr each; what is beyond is read and dropped."""
    file_bytes: int = 16 << 20
    """Of one file."""
    disk_bytes: int = 64 << 20
    """Of all files together. Without namespaces a watch measures it, and only in the run's own folder."""
    num_files: int = 1000
    """Files and folders in existence."""
    open_files: int = 256
    num_processes: int = 64
    namespaces: bool = True
    """Off: weak mode, and do not even try them."""
    cgroup: bool = True
    """Off: bound the memory of all processes together by the watch, even where a memory cgroup could be made."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: it must be positive")


@dataclass(frozen=True)
class SandboxResult:
    """Output and end of a run."""

    stdout: str
    stderr: str
    """Cut at `Limits.output_bytes`, the last line saying so."""
    answer: bytes
    """Bytes written to descriptor 3, at most as many as the caller requested."""
    exit_code: int | None
    """Minus the signal's number where a signal ended it; None where the sandbox did."""
    timed_out: bool
    """The wall time ran out."""
    killed_by: str | None
    """"wall time", "CPU time", "memory", "disk" or the name of a signal; None where the code ended itself."""
    stdout_cut: bool
    stderr_cut: bool
    answer_cut: bool
    wall_s: float
    mode: str
    """"namespaces" or "weak"."""
    landlock: int
    """Version of Landlock that hid files; 0: none, or not needed."""
    memory: str
    """The bound on the memory of all processes: "cgroup" or "watch"."""

    @property
    def ok(self) -> bool:
        """Return whether the code ended itself with exit code 0."""
        return self.exit_code == 0


_PREFIX = "fusionrl-sandbox-"
_numbers = itertools.count()


class MemoryCgroup:
    """A cgroup below this process's own, or its sibling, with a limit on memory and without swap."""

    def __init__(self, parent: Path, limit: int) -> None:
        self._folder = parent / f"{_PREFIX}{os.getpid()}-{threading.get_ident()}-{next(_numbers)}"
        self._folder.mkdir()
        try:
            if _is_v2(parent):
                (self._folder / "memory.max").write_text(str(limit))
                swap = self._folder / "memory.swap.max"
                swap_limit = 0
            else:
                (self._folder / "memory.limit_in_bytes").write_text(str(limit))
                swap = self._folder / "memory.memsw.limit_in_bytes"  # memory and swap together
                swap_limit = limit
            if swap.exists():
                swap.write_text(str(swap_limit))
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> bool:
        """Move a process into it; False: the kernel refuses. Takes some 10 ms, in which the process may run."""
        try:
            (self._folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        return True

    @property
    def oom_events(self) -> Path:
        """The file that counts the processes that the kernel killed for want of memory."""
        return self._folder / ("memory.events" if _is_v2(self._folder) else "memory.oom_control")

    def was_full(self) -> bool:
        """Return whether the kernel killed a process of it for want of memory."""
        return was_full(self.oom_events.read_bytes())

    def remove(self) -> None:
        """Remove it; its processes have ended."""
        for _ in range(20):
            try:
                self._folder.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    return
                time.sleep(0.01)  # a killed process leaves it a moment later


def _is_v2(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


@functools.cache
def writable_parent() -> Path | None:
    """A folder in which memory cgroups can be made; None: there is none, or this process lacks the right.

    In cgroup v2 a group with processes of its own has no limited groups below it, so the parent of this process's group
    is also tried; systemd's Delegate= gives it to a user.
    """
    for folder in (folder for chain in group_chains() for folder in chain[:2]):  # of this process, and its parent
        try:
            if _is_v2(folder) and "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                continue  # not ours to change: the memory of other processes would be counted from now on
            MemoryCgroup(folder, 64 << 20).remove()
        except OSError:
            continue
        return folder
    return None
