"""The clocks of a run's machines: measured by the driver, for the timeline.

Processes of one machine share a clock. After every step the driver asks one process of
each other machine, as clocks drift. A process that is dead or does not answer is skipped: a run never fails for its
timeline.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import ray

from fusionrl.observe import spans
from fusionrl.runtime.actor_registry import ActorRegistry
from fusionrl.runtime.ray_cluster import FAILURES

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0


class ClockOffsets:
    """Knows the processes on each other machine, once `find` has asked them all."""

    def __init__(self) -> None:
        self._elsewhere: dict[str, Callable[[], tuple[str, int]]] = {}

    def find(self, registry: ActorRegistry) -> None:
        """Ask the actors of a run for their machine."""
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name in [member.name for member in registry]:
            try:
                boot, _ = _ask(registry, name)
            except FAILURES as error:
                logger.warning("%s did not tell its clock: %s", name, error)
                continue
            if boot != spans.boot_id():
                names[boot].append(name)
        self.take({boot: partial(_ask_one, registry, some) for boot, some in names.items()})

    def take(self, elsewhere: dict[str, Callable[[], tuple[str, int]]]) -> None:
        """Ask these from now on: boot of a machine → a process of it."""
        self._elsewhere = elsewhere
        self.measure()

    def measure(self) -> None:
        """Record the clock of each other machine whose process answers."""
        recorder = spans.recorder()
        for ask in self._elsewhere.values() if recorder is not None else ():
            assert recorder is not None
            try:
                recorder.note_clock(*spans.measure_offset(ask))
            except FAILURES as error:
                logger.warning("a machine's clock was not measured: %s", error)


def _ask(registry: ActorRegistry, name: str) -> tuple[str, int]:
    """Ask the actor that has this name now: a restarted engine keeps the name."""
    handle = next((member.handle for member in registry if member.name == name), None)
    if handle is None:
        raise RuntimeError(f"{name} is gone")
    return ray.get(handle.clock.remote(), timeout=_ANSWER_S)


def _ask_one(registry: ActorRegistry, names: list[str]) -> tuple[str, int]:
    """Ask the first of a machine's actors; if it fails, the next call asks another."""
    try:
        return _ask(registry, names[0])
    except FAILURES:
        names.append(names.pop(0))
        raise
