"""`Actors`: every process of a run, composed: launcher, engines, trainers, weight sync and Buffer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self

from fusionrl.cluster.buffer_handle import BufferHandle
from fusionrl.cluster.engine_pool import EnginePool
from fusionrl.cluster.launcher import Launcher
from fusionrl.cluster.ray_cluster import FAILURES, gather, is_running, root_cause
from fusionrl.cluster.supervisor import Supervisor
from fusionrl.cluster.trainers import TrainerGroups
from fusionrl.cluster.weight_sync import WeightSync
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.driver.signals import StopSignal
from fusionrl.engines.process import ChildExited
from fusionrl.plan.plan import Plan

logger = logging.getLogger(__name__)


class Actors:
    """A context manager: entering it starts all processes, leaving it ends them. An actor's death is named then."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: Path,
        attempt: int,
        *,
        say: Callable[[str], None] = lambda text: None,
        stop: StopSignal | None = None,
    ) -> None:
        """`say` is told what is going on; `stop` may end a wait."""
        self._plan, self._say = plan, say
        self._stop = stop or StopSignal()
        self._on_ray = stop.install if stop is not None else lambda: None
        self._launcher = Launcher(config, plan, run_dir, attempt)
        self.engines = EnginePool(
            config,
            plan,
            self._launcher,
            say=say,
            check_stop=self._stop.check,
            on_addresses=lambda urls: self.buffer.set_engines(urls),
        )
        supervisor = Supervisor(self.engines.check, self._stop)
        self.trainers = TrainerGroups(config, plan, supervisor.finish)
        self.buffer = BufferHandle(self.engines, supervisor)
        self.weights = WeightSync(
            config, plan, self._launcher.run_dir, self.trainers, self.engines, self._launcher.api_key
        )

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._end(error)

    def _start(self) -> None:
        self._say("starting Ray")
        self._launcher.start(self._on_ray)
        self._say("starting " + ", ".join(self._parts()))
        self.engines.start()
        self.trainers.actors, self.trainers.auxiliaries = self._launcher.make_trainers()
        prepared = self.buffer.start(self._launcher.make_buffer())
        ready = self._launcher.setup_trainers([self.trainers.actors, self.trainers.auxiliaries])
        buffer_ready = self.buffer.setup(self.engines.finish_start())
        if ready:
            logger.info("trainers: %s", gather(ready, self._stop.check)[0])
        _, facts = gather([prepared, buffer_ready], self._stop.check)
        if facts["num_too_long"]:
            self._say(f"{facts['num_too_long']} prompts are over --rollout-max-prompt-len and left out")

    def _parts(self) -> list[str]:
        parts = []
        if self._plan.num_engines:
            parts.append(f"{self._plan.num_engines} engine{'s' * (self._plan.num_engines > 1)} and the router")
        if num_more := len(self._plan.eval_bundles):
            parts.append(f"{num_more} engine{'s' * (num_more > 1)} that only evaluate{'s' * (num_more == 1)}")
        parts += ["the " + scorer.role.replace("-", " ") for scorer in self._plan.scorers]
        if self._plan.layout:
            parts.append(f"{self._plan.layout.world_size} trainer{'s' * (self._plan.layout.world_size > 1)}")
        return parts or ["the Buffer"]

    def _end(self, error: BaseException | None) -> None:
        """End every process of the run.

        Raises:
            RuntimeError: `error` is the consequence of a process that died: this one names it.
        """
        cause = None
        try:
            if isinstance(error, FAILURES):
                cause = self._find_death(error)
                self._launcher.keep_ray_logs()
        finally:
            self.close()
        if cause is not None:
            raise cause from error

    def _find_death(self, error: BaseException) -> RuntimeError | None:
        # These name their cause: a user's mistake, a user's function, a server that ended.
        if not is_running() or isinstance(root_cause(error), ValueError | HookError | ChildExited):
            return None
        try:
            return self._launcher.roster.explain(error) or self.engines.find_dead()
        except FAILURES as failure:  # must not hide the error
            logger.debug("nobody can say who is dead: %s", failure)
            return None

    def close(self) -> None:
        """End every process of the run. Idempotent; never raises what would hide the error that led here."""
        try:
            if is_running():
                self.buffer.close()
                self.engines.shutdown()
                self.weights.drop_files()
        finally:
            self.trainers.actors, self.trainers.auxiliaries = [], []
            self._launcher.close()
