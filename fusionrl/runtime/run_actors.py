"""`Actors`: every process of a run, composed: launcher, engines, trainers, weight sync and Buffer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fusionrl.base.wording import counted
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.config.run import ProfileOrder
from fusionrl.engines.images import FOLDER as IMAGE_FILES
from fusionrl.engines.process import ChildExited
from fusionrl.observe.run_dir import engine_url
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher, LocalLauncher
from fusionrl.runtime.recovery import TrainerRecovery
from fusionrl.runtime.supervisor import FAILURES, StopSignal, Supervisor, Terminated, root_cause
from fusionrl.runtime.telemetry import ClockOffsets, HardwareMetrics, Profiling
from fusionrl.runtime.trainers import TrainerGroups, set_up
from fusionrl.runtime.weight_sync import WeightSync
from fusionrl.weights.remote_calls import gather

if TYPE_CHECKING:
    from fusionrl.runtime.external_engines import ExternalEngines
    from fusionrl.runtime.watchdog import Watchdog

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
        early_start: EarlyStart | None = None,
    ) -> None:
        """`say` shows progress; `stop` may end a wait; `early_start` holds what was started before."""
        self._config, self._plan, self._say, self._in_process = config, plan, say, config.run.in_process
        self._stop = stop or StopSignal()
        self._on_ray = stop.install if stop is not None else lambda: None
        launcher = LocalLauncher if self._in_process else Launcher
        self._launcher = launcher(config, plan, run_dir, attempt, early_start)
        self.restarts = self._launcher.restarts
        run_dir = self._launcher.run_dir
        self.engines = EnginePool(
            *(config, plan, self._launcher),
            say=say,
            check_stop=self._stop.check,
            on_addresses=self._tell_addresses,
        )
        self.supervisor = Supervisor(self.check_engines, self._stop)
        self.trainers = TrainerGroups(config, plan, self.supervisor.finish)
        self.buffer = BufferHandle(self.engines, self.supervisor, self._launcher, plan.knobs)
        self.recovery = TrainerRecovery(config, self._launcher, self.trainers, self.buffer, self.engines)
        self.external_engines: ExternalEngines | None = None
        self.clocks: ClockOffsets | None = None  # of other machines
        self._watchdog: Watchdog | None = None
        if not self._in_process:  # there a person may stay at a breakpoint for any time
            from fusionrl.runtime.watchdog import ProgressProbes, Watchdog

            probes = ProgressProbes(self._launcher, self.engines, self.buffer)
            self._watchdog = Watchdog(
                *(run_dir / "logs", attempt, probes, config.run.stall_warn_s, config.run.stall_timeout_s),
                end_trainers=self.recovery.end_stalled if config.run.max_restarts else None,
            )
            if not plan.has_pairs:
                from fusionrl.runtime.external_engines import ExternalEngines

                self.external_engines = ExternalEngines(
                    config, plan, self._launcher, self.engines, say, self._tell_addresses
                )
        pushed_to = (self.trainers, self.engines, self._launcher.api_key, self.external_engines)
        self.weights = WeightSync(config, plan, run_dir, *pushed_to)
        self.hardware = HardwareMetrics(
            *(plan, self.trainers, self.engines, self.buffer),
            run_dir / f"hardware.a{attempt}.json",
            config.cluster.peak_tflops,
            asks=not self._in_process,
        )
        order = ProfileOrder.of(config)
        self.profiling: Profiling | None = None
        if order is not None:
            self.profiling = Profiling(order, self.trainers, self.engines, run_dir, attempt, plan.num_rollout)

    def __enter__(self) -> Self:
        if self._watchdog is not None:
            self._watchdog.__enter__()
        try:
            with phase("start"):
                self._start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        with phase("end"):
            self._end(error)

    def _start(self) -> None:
        self._say("starting in one process" if self._in_process else "starting Ray")
        self._launcher.start(self._on_ray)
        self._say("starting " + ", ".join(self._parts()))
        launcher, check_stop = self._launcher, self._stop.check
        facts = start_all(self._plan, launcher, self.engines, self.trainers, self.buffer, check_stop)
        self.weights.load_adapters()
        if self.external_engines is not None:
            addresses = self._config.cluster.rollout_external_engine_addrs
            self.external_engines.start(self.engines.router, [engine_url(address) for address in addresses])
        if not launcher.is_alone:
            self.clocks = ClockOffsets(launcher.registry)
            self.clocks.find()
        if facts["num_too_long"]:
            self._say(f"{facts['num_too_long']} prompts are over --rollout-max-prompt-len and left out")

    def check_engines(self, is_generating: bool) -> None:
        """Raise where an engine is dead that is not replaced."""
        self.engines.check(is_generating)
        if self.external_engines is not None:
            self.external_engines.look()

    def _tell_addresses(self) -> None:
        others = [] if self.external_engines is None else self.external_engines.urls
        self.buffer.set_engines([*self.engines.addresses, *others], self.engines.evaluation.addresses)

    def _parts(self) -> list[str]:
        parts = []
        if self._plan.num_engines:
            parts.append(f"{counted(self._plan.num_engines, 'engine')} and the router")
        if num_more := len(self._plan.eval_bundles):
            parts.append(f"{counted(num_more, 'engine')} that only evaluate{'s' * (num_more == 1)}")
        parts += ["the " + scorer.role.replace("-", " ") for scorer in self._plan.scorers]
        if self._plan.layout:
            parts.append(counted(self._plan.layout.world_size, "trainer"))
        return parts or ["the Buffer"]

    def _end(self, error: BaseException | None) -> None:
        """End every process of the run. Raises RuntimeError if `error` is the consequence of a process that died, or of
        a stall: this one names it."""
        cause = self._stall_behind(error)
        if self._watchdog is not None:
            self._watchdog.__exit__()
        try:
            # After any other error a process may be dead, or in a hurry to end.
            if isinstance(error, None | Terminated):
                self.close_profile()
            if isinstance(error, FAILURES):
                cause = self._find_death(error)
                self._launcher.registry.note_origin(cause or error)
                self._launcher.keep_ray_logs()
        finally:
            self.close()
        if cause is not None:
            raise cause from error

    def close_profile(self) -> None:
        """Let a profile that is under way be written, while all live. Idempotent."""
        if self.profiling is not None:
            self.profiling.close()

    def is_stalled(self, error: BaseException) -> bool:
        """Return whether `error` is the watchdog's end of a stalled run (--stall-timeout-s)."""
        return self._stall_behind(error) is not None

    def _stall_behind(self, error: BaseException | None) -> RuntimeError | None:
        return None if self._watchdog is None else self._watchdog.ended_by(error)

    def _find_death(self, error: BaseException) -> RuntimeError | None:
        if self._in_process or not self._launcher.is_running:  # without Ray no actor can be questioned
            return None
        from fusionrl.runtime.watchdog import Stalled

        # These name their cause: a user's mistake, a user's function, a server that ended, ranks that were ended.
        if isinstance(root_cause(error), ValueError | HookError | ChildExited | Stalled):
            return None
        try:
            return self._launcher.registry.explain(error) or self.engines.find_dead()
        except FAILURES as failure:  # must not hide the error
            logger.debug("nobody can say who is dead: %s", failure)
            return None

    def close(self) -> None:
        """End every process of the run. Idempotent; never raises what would hide the error that led here."""
        try:
            if self._launcher.is_running:
                self.buffer.close()
                if self.external_engines is not None:
                    self.external_engines.release()
                self.engines.shutdown()
                self.weights.drop_files()
        finally:
            self.trainers.policy, self.trainers.auxiliaries = [], []
            self._launcher.close()
            shutil.rmtree(self._launcher.run_dir / IMAGE_FILES, ignore_errors=True)


def start_all(
    plan: Plan,
    launcher: Launcher,
    engines: EnginePool,
    trainers: TrainerGroups,
    buffer: BufferHandle,
    check_stop: Callable[[], None],
) -> dict[str, int]:
    """Start engines, trainers and the Buffer; on devices of their own at the same time. Returns facts of the data.

    Processes of trainers take no memory of a device before they are set up, so they start at once in any case.
    """
    order = plan.start_order
    if order != "trainers first":
        engines.start()
    trainers.policy, trainers.auxiliaries = launcher.make_trainers(plan)
    prepared = buffer.start()
    if order == "together":
        ready = set_up([trainers.policy, trainers.auxiliaries])
        buffer_ready = buffer.setup(engines.finish_start())
        if ready:
            logger.info("trainers: %s", gather(ready, check_stop)[0])
    elif order == "engines first":
        endpoints = engines.finish_start()
        engines.release_memory()
        buffer_ready = buffer.setup(endpoints)
        trainers.start(check_stop)
    else:
        trainers.start(check_stop)
        trainers.offload()
        engines.start()
        buffer_ready = buffer.setup(engines.finish_start())
    facts: dict[str, int] = gather([prepared, buffer_ready], check_stop)[1]
    return facts
