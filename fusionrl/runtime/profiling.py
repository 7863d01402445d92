"""`Profiling`: profiles of the processes and steps that --profile-… select, controlled by the driver."""

import logging
from collections.abc import Sequence
from pathlib import Path

from ray.actor import ActorHandle

from fusionrl.config.run import PROFILES, ProfileOrder
from fusionrl.observe.spans import phase
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.ray_cluster import FAILURES
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.weights.remote_calls import Reference, get, wait

logger = logging.getLogger(__name__)

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 600.0  # a large trace takes minutes to write
_CLOSE_TIMEOUT_S = 60.0  # a run that is stopped may have little time left


class Profiling:
    """Begins a profile before a step and ends it after it, or after the last of a stretch. A profile that fails
    only logs a warning."""

    def __init__(
        self,
        order: ProfileOrder | None,
        trainers: TrainerGroups,
        engines: EnginePool,
        run_dir: Path,
        attempt: int,
        last_step: int | None = None,
    ) -> None:
        self._order, self._groups, self._pool, self._last_step = order, trainers, engines, last_step
        self._folder, self._attempt = run_dir.absolute() / PROFILES, attempt
        self._first_step = 0  # of the profile under way; 0: none is

    def begin(self, step: int) -> None:
        """Start the profilers if a step begins that --profile-steps names."""
        order = self._order
        if order is None or self._first_step or not order.has(step):
            return
        self._first_step = step
        calls = [handle.start_profile.remote(order.tool) for _, handle in self._trainers(order)]
        for index, handle in self._engines(order):
            calls.append(handle.start_profile.remote(order.tool, str(self._folder), self._name(f"engine-{index}")))
        with phase("profile", step=step):
            self._wait(calls, _START_TIMEOUT_S, "begun")

    def end(self, step: int) -> None:
        order = self._order
        if order is None or not self._first_step:
            return
        if order.is_continuous and order.has(step + 1) and step != self._last_step:
            return
        self._stop(order, step, _STOP_TIMEOUT_S)

    def close(self) -> None:
        """The run ends: write a profile of several steps that is under way."""
        if self._order is not None and self._first_step:
            self._stop(self._order, self._first_step, _CLOSE_TIMEOUT_S)

    def _stop(self, order: ProfileOrder, step: int, timeout_s: float) -> None:
        calls = [
            handle.stop_profile.remote(order.tool, str(self._folder / self._name(f"trainer-{rank}")))
            for rank, handle in self._trainers(order)
        ]
        calls += [handle.stop_profile.remote() for _, handle in self._engines(order)]
        with phase("profile", step=step):
            self._wait(calls, timeout_s, "ended")
        self._first_step = 0

    def _name(self, process: str) -> str:
        return f"step_{self._first_step:06d}.{process}.a{self._attempt}"

    def _trainers(self, order: ProfileOrder) -> list[tuple[int, ActorHandle]]:
        return [(rank, trainer) for rank, trainer in enumerate(self._groups.actors) if order.wants_trainer(rank)]

    def _engines(self, order: ProfileOrder) -> list[tuple[int, ActorHandle]]:
        return [(index, engine) for index, engine in enumerate(self._pool.engines) if order.wants_engine(index)]

    def _wait(self, calls: Sequence[Reference[object]], timeout_s: float, action: str) -> None:
        for call in calls:
            try:
                if not wait([call], timeout=timeout_s)[0]:
                    raise RuntimeError(f"no answer within {timeout_s:g} s")
                get(call)
            except FAILURES as error:
                logger.warning("step %d: a profile could not be %s: %s", self._first_step, action, error)
