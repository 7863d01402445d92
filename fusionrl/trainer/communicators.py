"""NCCL's own buffers, given away and taken back with a trainer's memory, where torch (2.13) and NCCL (2.29.7) can.

Not every process group has a communicator of NCCL's: the groups that carry Python objects are gloo's, which has no
memory on a device and refuses to be suspended, or resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A backend of a process group, as far as it is needed here: torch's own have `suspend` and `resume` since 2.13."""

    def name(self) -> str:
        """ "nccl", "gloo", …"""


class Communicators:
    """The communicators that are suspended; `resume` wakes those and no others."""

    def __init__(self) -> None:
        self._suspended: list[Backend] = []

    def __len__(self) -> int:
        """Return how many are suspended."""
        return len(self._suspended)

    def suspend(self, backends: Iterable[Backend]) -> None:
        """Suspend the NCCL backends among these, in order; where the first cannot be, none is, and the log says so.

        A collective over the ranks of each: every rank must meet its groups in the order in which they were made.
        """
        if self._suspended:
            return
        for backend in backends:
            if backend.name() != "nccl":
                continue
            method = getattr(backend, "suspend", None)
            try:
                if method is None:
                    raise NotImplementedError(f"torch {torch.__version__} has no such call")
                method()
            except (NotImplementedError, RuntimeError) as error:
                logger.info("process groups keep their buffers: they cannot be suspended (%s)", error)
                return
            self._suspended.append(backend)

    def resume(self) -> None:
        """Wake what was suspended."""
        while self._suspended:
            # Do not retry after a failure: it ends the run.
            method = getattr(self._suspended.pop(0), "resume")  # noqa: B009 (not of the protocol: torch 2.13's)
            method()


def backends_of_groups(device: torch.device) -> Iterator[Backend]:
    """The backends for `device` of all process groups of this process, in the order in which they were made."""
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            yield group._get_backend(device)
        except RuntimeError:  # a group without one for this device
            continue
