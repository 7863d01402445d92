"""`EnginePool`: the engines of a run, their addresses, their recovery and their memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import ray
from ray.actor import ActorHandle

from fusionrl.buffer.endpoints import EngineEndpoints
from fusionrl.cluster.engine_specs import expert_parts
from fusionrl.cluster.eval_engines import EvalEngines
from fusionrl.cluster.launcher import Launcher
from fusionrl.cluster.ray_cluster import gather
from fusionrl.cluster.recovery import Recovery
from fusionrl.cluster.refusals import RefusalWatch
from fusionrl.config.config import Config
from fusionrl.engines.router import Router
from fusionrl.plan.plan import Plan
from fusionrl.plan.push import EngineTarget

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 20.0


class EnginePool:
    """Engines of the policy behind one router, and beside them those of a reward model or teacher."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        launcher: Launcher,
        *,
        say: Callable[[str], None] = lambda text: None,
        check_stop: Callable[[], None] = lambda: None,
        on_addresses: Callable[[Sequence[str]], None] = lambda urls: None,
    ) -> None:
        """`say` is told what is going on; `check_stop` is called while waiting, and may raise to end the wait;
        `on_addresses` is told the engines' addresses when they change."""
        self._config, self._plan, self._launcher = config, plan, launcher
        self._say, self._check_stop, self._on_addresses = say, check_stop, on_addresses
        self.engines: list[ActorHandle] = []
        self.urls: list[str] = []
        self.evaluation = EvalEngines(plan, launcher)
        self._scorers: dict[str, list[ActorHandle]] = {}  # role → engines that only read, and get no weights
        self._starts: list[ray.ObjectRef] = []  # of the addresses of all engines
        self._router: Router | None = None
        self._recovery: Recovery | None = None  # --use-fault-tolerance
        self.refusals: RefusalWatch | None = None
        self._is_memory_away = False

    # ------------------------------------------------------------------------------------ start and end
    def start(self) -> None:
        """Begin to start every engine; see `finish_start`."""
        if not self._plan.num_engines:
            return
        self.engines = [self._launcher.make_engine("engine", index) for index in range(self._plan.num_engines)]
        for scorer in self._plan.scorers:
            indices = range(len(scorer.bundles))
            self._scorers[scorer.role] = [self._launcher.make_engine(scorer.role, index) for index in indices]
        self.evaluation.make()
        self._starts = [engine.start.remote() for engine in self._all()]

    def finish_start(self) -> EngineEndpoints:
        """Start the router, and wait until it has every engine of the policy. Returns all addresses."""
        if not self._starts:
            return EngineEndpoints()
        self._router = self._launcher.make_router()
        router_url, eval_router_url = self._router.start(), self.evaluation.start_router()
        self.refusals = RefusalWatch(self._router)
        urls = iter(gather(self._starts, self._check_stop))
        self.urls = [next(urls) for _ in self.engines]
        scorer_urls = {role: tuple(next(urls) for _ in engines) for role, engines in self._scorers.items()}
        self.evaluation.join(list(urls))
        for url in self.urls:
            self._router.add_worker(url, self._launcher.api_key)
        if self._config.rollout.use_fault_tolerance:
            self._recovery = self._make_recovery(self._router)
        return EngineEndpoints(
            router_url,
            tuple(self.urls),
            self._launcher.api_key,
            rm_urls=scorer_urls.get("reward-model", ()),
            teacher_urls=scorer_urls.get("teacher", ()),
            eval_router_url=eval_router_url,
            eval_urls=tuple(self.evaluation.urls),
        )

    def _make_recovery(self, router: Router) -> Recovery:
        rollout = self._config.rollout
        return Recovery(
            self.engines,
            self.urls,
            router,
            partial(self._launcher.make_engine, "engine"),
            api_key=self._launcher.api_key,
            interval_s=rollout.rollout_health_check_interval,
            timeout_s=rollout.rollout_health_check_timeout,
            first_wait_s=rollout.rollout_health_check_first_wait,
            say=self._say,
        )

    def _all(self) -> list[ActorHandle]:
        return self.engines + self._others()

    def _others(self) -> list[ActorHandle]:
        """The engines that are never replaced, in the order in which they were made."""
        return [engine for engines in self._scorers.values() for engine in engines] + self.evaluation.engines

    def shutdown(self) -> None:
        """End every server, and the router; gives up after some seconds. The actors go on. Idempotent."""
        stops = [engine.shutdown.remote() for engine in self._all()]
        if self._router is not None:
            self._router.shutdown()
        self.evaluation.end_router()
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
        self._router = self._recovery = self.refusals = None

    # ------------------------------------------------------------------------------------ supervision
    def begin_round(self) -> None:
        """From now on the engines generate: health checks begin."""
        if self._recovery is not None:
            self._recovery.begin_round()

    def check(self, is_generating: bool) -> None:
        """Raise with the end of its log when a server or the router is dead; with --use-fault-tolerance replace it.

        Colocated on GPUs a new engine has no room while the trainers work: there a death ends the run even so.
        """
        if self._router is not None:
            self._router.check_alive()
        self.evaluation.check_router()
        if self._recovery is None or self._is_memory_away:
            ray.get([engine.check_alive.remote() for engine in self._all()])
            return
        self._recovery.check(is_generating)
        ray.get([engine.check_alive.remote() for engine in self._others()])

    def find_dead(self) -> RuntimeError | None:
        """After a failure: the error of a server or the router that is dead. Replaces none."""
        if not self.urls:  # the failure is one of the start
            return None
        engines = self._all() if self._recovery is None else self._others()
        try:
            if self._router is not None:
                self._router.check_alive()
            self.evaluation.check_router()
            checks = [engine.check_alive.remote() for engine in engines]
            ray.get(ray.wait(checks, num_returns=len(checks), timeout=_STOP_TIMEOUT_S)[0] if checks else [])
        except RuntimeError as error:
            return error
        except ray.exceptions.RayError as error:  # an actor that is dead, or cannot be asked: the roster knows
            logger.debug("the engines cannot be asked: %s", error)
        return None

    def find_hung(self) -> int:
        """After a push that failed: take out the engines that make no token. Returns their number."""
        return self._recovery.find_hung() if self._recovery is not None else 0

    def count_faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: what has gone wrong so far, as the driver and the router count it."""
        if self._recovery is None or self._router is None:
            return {}
        counts = {"engines_died": float(self._recovery.num_died)}
        try:
            counts["requests_retried"] = float(self._router.num_retries())
        except RuntimeError as error:  # a number alone: a busy machine may hold its answer up
            logger.warning("the router does not say how many requests it sent again: %s", error)
        return counts

    # ------------------------------------------------------------------------------------ recovery
    @property
    def is_recovering(self) -> bool:
        """Return whether engines that die are replaced (--use-fault-tolerance)."""
        return self._recovery is not None

    @property
    def num_out(self) -> int:
        """Engines that died and do not serve yet."""
        return self._recovery.num_out if self._recovery is not None else 0

    def finish_starts(self) -> bool:
        """Wait for the engines that start in the place of dead ones. Returns whether there were any."""
        if self._recovery is None or not self._recovery.num_out:
            return False
        self._say("waiting for engines that start again")
        started = self._recovery.finish_starts(self._check_stop)
        if self._is_memory_away:
            ray.get([self.engines[index].release_memory.remote(None) for index in started])
        return True

    def join(self) -> None:
        """Let engines that are started and have the current weights get requests."""
        if self._recovery is not None and self._recovery.num_out:
            self._recovery.join()
            self._on_addresses(self.urls)

    def targets(self) -> list[EngineTarget]:
        """The policy's engines as a weight push addresses them, and after these the ones that only evaluate."""
        restarts, bundles = self._recovery.num_restarts if self._recovery else {}, self._plan.all_engine_bundles
        nodes = [self._launcher.bundles[places[0]].node_id for places in bundles]
        parts = expert_parts(self._config)
        return [
            EngineTarget(index, engine, node, places, restarts.get(index, 0), parts)
            for index, (engine, node, places) in enumerate(
                zip(self.engines + self.evaluation.engines, nodes, bundles, strict=True)
            )
        ]

    # ------------------------------------------------------------------------------------ memory
    @property
    def is_memory_away(self) -> bool:
        """Return whether the engines gave their memory back."""
        return self._is_memory_away

    def release_memory(self) -> None:
        """Give the engines' memory back before the trainers work, where the two take turns. Idempotent."""
        if not self._plan.engines_give_memory or self._is_memory_away:
            return
        if self._recovery is not None:
            self._recovery.check(is_generating=False)
        self.finish_starts()  # a new engine loads where the trainers do not need the memory yet
        ray.get([engine.flush_cache.remote() for engine in self.engines])
        ray.get([engine.release_memory.remote(None) for engine in self.engines])
        self._is_memory_away = True

    def resume_memory(self, tags: list[str], *, is_last: bool) -> None:
        """Take back a part of the memory; `is_last`: now all of it is here."""
        ray.get([engine.resume_memory.remote(tags) for engine in self.engines])
        self._is_memory_away = not is_last
