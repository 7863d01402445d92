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
from fusionrl.observe.log import setup_logging, write_whole_lines


@dataclass(frozen=True)
class Settled:
    """Settings that an actor's process takes over before anything else: the rights of its files, and secrets."""

    umask: int
    hook_secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def apply(self) -> None:
        """Take it over. On a cluster that the run has joined, the process has the environment of that cluster."""
        os.umask(self.umask)
        take_secrets(self.hook_secrets)


def log_to(path: str, role: str, level: str = "info") -> None:
    """Let the process write to the file `path`, which is made where it is not there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # less the umask
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    write_whole_lines()
    setup_logging(level, Path(path), role=role, terminal=False)
