"""The process of an actor: its settings, and its log.

Everything a process prints, and what C++ libraries write to its descriptors, lands in the actor's file in the run's
folder.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fusionrl.base.environment import take_secrets
from fusionrl.base.network_interfaces import collective_interfaces
from fusionrl.base.open_files import raise_open_files
from fusionrl.base.stack_signal import answer_with_stacks
from fusionrl.observe.logs import setup_logging, write_whole_lines
from fusionrl.observe.spans import clock, record_beside


@dataclass(frozen=True)
class ProcessSettings:
    """Settings that an actor's process takes over before anything else: the rights of its files, and secrets.

    It may open as many files as its machine allows.

    host           the address of its node; its interface is looked up there, as no other node can
    numa_affinity  it is bound to the CPUs near its GPUs, once it starts what uses them
    """

    umask: int
    hook_secrets: dict[str, str] = field(default_factory=dict, repr=False)
    host: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    numa_affinity: bool = False

    def apply(self) -> None:
        """Take it over. On a cluster that the run has joined, the process has the environment of that cluster."""
        os.umask(self.umask)
        os.environ.update(self.environment)  # before torch is imported, which reads its number of threads once
        raise_open_files()
        take_secrets(self.hook_secrets)
        if self.host is not None:
            os.environ.update(collective_interfaces(self.host, os.environ))


class ClockMixin:
    """A process that tells its clock (see `clocks`)."""

    def clock(self) -> tuple[str, int]:
        """Return the machine's boot and its monotonic clock, ns."""
        return clock()


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
    setup_logging(level, Path(path), role=role, terminal=False)
    answer_with_stacks()
    record_beside(path)
