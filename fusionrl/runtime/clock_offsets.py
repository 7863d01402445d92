"""The clocks of a run's machines: measured by the driver, for the timeline.

Processes of one machine share a clock. After every step the driver asks one process of each other machine, as clocks
drift. A process that is dead or does not answer is skipped: a run never fails for its timeline.
"""

import logging
from collections import defaultdict
from functools import partial

import ray

from fusionrl.observe import spans
from fusionrl.runtime.actor_registry import ActorRegistry
from fusionrl.runtime.ray_cluster import FAILURES

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0


class ClockOffsets:
    """Knows the actors on each other machine, once `find` has asked them all."""

    def __init__(self, registry: ActorRegistry) -> None:
        self._registry = registry
        self._elsewhere: defaultdict[str, list[str]] = defaultdict(list)  # boot of a machine → names of actors

    def find(self) -> None:
        """Ask the actors of the run for their machine, and measure for the first time."""
        for name in [member.name for member in self._registry]:
            try:
                boot, _ = self._ask(name)
            except FAILURES as error:
                logger.warning("%s did not tell its clock: %s", name, error)
                continue
            if boot != spans.boot_id():
                self._elsewhere[boot].append(name)
        self.measure()

    def measure(self) -> None:
        """Record the clock of each other machine, if the first of its actors answers; if not, ask another next time."""
        if (recorder := spans.recorder()) is None:
            return
        for names in self._elsewhere.values():
            try:
                recorder.note_clock(*spans.measure_offset(partial(self._ask, names[0])))
            except FAILURES as error:
                names.append(names.pop(0))
                logger.warning("a machine's clock was not measured: %s", error)

    def _ask(self, name: str) -> tuple[str, int]:
        """Ask the actor that has this name now: a restarted engine keeps the name."""
        handle = next((member.handle for member in self._registry if member.name == name), None)
        if handle is None:
            raise RuntimeError(f"{name} is gone")
        return ray.get(handle.clock.remote(), timeout=_ANSWER_S)
