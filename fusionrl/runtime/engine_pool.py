"""`EnginePool`: all engines of a run, their addresses and memory, and which of them the run survives."""

import logging
from collections.abc import Callable

import ray
from ray.actor import ActorHandle

from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.engines.router import Router
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget, place_over
from fusionrl.runtime.engine_specs import expert_parts
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.routed_engines import END_TIMEOUT_S, RoutedEngines
from fusionrl.weights.remote_calls import gather, get, wait

logger = logging.getLogger(__name__)

CACHES = ["kv_cache", "cuda_graph"]  # SGLang's names for an engine's memory other than weights


class EnginePool(RoutedEngines):
    """The policy's engines, those that only evaluate, and the engines of a reward model or teacher.

    Engines that only evaluate (--eval-num-gpus) have a router of their own, and numbers after the policy's. A push
    reaches them at the start and when an evaluation follows it; in between they keep their version. A dead one is
    replaced, and the new one gets the weights of the next evaluation: no answer mixes versions, so a part that no other
    engine takes over fails.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        launcher: Launcher,
        *,
        say: Callable[[str], None] = lambda text: None,
        check_stop: Callable[[], None] = lambda: None,
        on_addresses: Callable[[], None] = lambda: None,
    ) -> None:
        """`say` shows progress; `check_stop` is called while waiting and may raise to end the wait; `on_addresses` is
        called when the addresses of engines have changed."""
        group = (config, launcher, say, check_stop)

        def work_of(index: int) -> str:
            own = plan.group_of(index) if plan.has_pairs else None
            return "" if own is None else own.role

        # On devices that they share, trainers have none of their own where a node joins.
        super().__init__(*group, takes_back=not plan.takes_turns, work_of=work_of)
        self._plan, self._on_addresses = plan, on_addresses
        self.router_url = ""
        self.evaluation = RoutedEngines(*group, router_name="eval-router", first=plan.num_engines, may_lose_all=True)
        self._scorers: dict[str, list[ActorHandle]] = {}  # role → engines that only read, and get no weights
        self._starts: list[ray.ObjectRef] = []  # of the addresses of all engines
        self.is_memory_away = False
        """The engines gave their memory back."""
        self._told_left_out: set[int] = set()  # the numbers of those whose addresses are taken back
        self._died_before: RuntimeError | None = None  # before servers made way

    # ------------------------------------------------------------------------------------ start and end
    def start(self) -> None:
        """Begin to start every engine; see `finish_start`."""
        if not self._plan.num_engines:
            return
        make, first = self._launcher.make_engine, self._plan.num_engines
        self.engines += [make("engine", index) for index in range(first)]
        for scorer in self._plan.scorers:
            self._scorers[scorer.role] = [make(scorer.role, index) for index in range(len(scorer.bundles))]
        self.evaluation.engines += [make("engine", first + index) for index in range(len(self._plan.eval_bundles))]
        self._starts = [engine.start.remote() for engine in self.everyone]

    def finish_start(self) -> EngineEndpoints:
        """Start the router, and wait until it has every engine of the policy. Returns all addresses."""
        if not self._starts:
            return EngineEndpoints()
        self.router_url, eval_router_url = self.start_router(), self.evaluation.start_router()
        urls = iter(gather(self._starts, self._check_stop))
        policy_urls = [next(urls) for _ in self.engines]
        scorer_urls = {role: tuple(next(urls) for _ in engines) for role, engines in self._scorers.items()}
        self.serve(policy_urls)  # first: with the policy's addresses `find_dead` asks all servers
        self.evaluation.serve(urls)
        for group in (self, self.evaluation):
            group.is_recovering = bool(group.engines) and self._config.rollout.use_fault_tolerance
        return EngineEndpoints(
            self.router_url,
            tuple(self.urls),
            self._launcher.api_key,
            rm_urls=scorer_urls.get("reward-model", ()),
            teacher_urls=scorer_urls.get("teacher", ()),
            eval_router_url=eval_router_url,
            eval_urls=tuple(self.evaluation.urls),
        )

    def _recovering(self, with_evaluation: bool = True) -> list[RoutedEngines]:
        groups = (self, self.evaluation) if with_evaluation else (self,)
        return [group for group in groups if group.is_recovering]

    @property
    def everyone(self) -> list[ActorHandle]:
        """All engines that are not left out, in the order in which they were made."""
        scorers = [engine for engines in self._scorers.values() for engine in engines]
        return self.present + scorers + self.evaluation.present

    @property
    def left_out_numbers(self) -> set[int]:
        """The numbers of the engines that are left out, of the policy's and those that only evaluate."""
        return {*self.left_out, *(len(self.engines) + index for index in self.evaluation.left_out)}

    def _lasting(self) -> list[ActorHandle]:
        """The engines that are not replaced when they die."""
        if not self.is_recovering:
            return self.everyone
        return [engine for engines in self._scorers.values() for engine in engines]

    def shutdown(self) -> None:
        """End every server, and the router; gives up after some seconds. The actors live on. Idempotent."""
        stops = [engine.shutdown.remote() for engine in self.everyone]
        self.end_router()
        self.evaluation.end_router()
        if stops:
            wait(stops, num_returns=len(stops), timeout=END_TIMEOUT_S)

    def make_way(self) -> None:
        """At the end of a run, end the servers with which trainers take turns: they have memory that the trainers need
        to save, and may be at work."""
        if self._plan.engines_give_memory and self.urls:
            self._died_before = self.find_dead()
            self.urls = []
            stops = [engine.shutdown.remote() for engine in self.present]
            wait(stops, num_returns=len(stops), timeout=END_TIMEOUT_S)

    # ------------------------------------------------------------------------------------ supervision
    def _routers(self) -> list[Router]:
        return [router for router in (self.router, self.evaluation.router) if router is not None]

    def begin_round(self) -> None:
        for group in self._recovering():
            group.health.begin_round()

    def check(self, is_generating: bool) -> None:
        """Raise with the end of its log when a server is dead; with --use-fault-tolerance replace it. A router that is
        dead is started again (--max-restarts).

        Colocated on GPUs a new engine has no room while the trainers work: there a death ends the run even so.
        """
        for router in self._routers():
            router.check_alive()
        if not self.is_recovering or self.is_memory_away:
            get([engine.check_alive.remote() for engine in self.everyone])
            return
        for group in self._recovering():
            group.replace_dead(is_generating)
        get([engine.check_alive.remote() for engine in self._lasting()])

    def find_dead(self) -> RuntimeError | None:
        """After a failure: return the error of a dead server or router. Replaces none."""
        if not self.urls:  # the start failed, or they have made way
            return self._died_before
        for router in self._routers():
            if (fault := router.find_fault()) is not None:
                return fault
        try:
            checks = [engine.check_alive.remote() for engine in self._lasting()]
            get(wait(checks, num_returns=len(checks), timeout=END_TIMEOUT_S)[0] if checks else [])
        except RuntimeError as error:
            return error
        except ray.exceptions.RayError as error:  # an actor that is dead, or cannot be asked: the registry knows
            logger.debug("the engines cannot be asked: %s", error)
        return None

    def check_answers(self, with_evaluation: bool = False, *, makes_tokens: bool = False) -> int:
        """With --use-fault-tolerance, before a push, or with `makes_tokens` after one that failed: replace the engines
        that are dead, or do not answer, or make no token. Returns their number."""
        return sum(group.replace_silent(makes_tokens=makes_tokens) for group in self._recovering(with_evaluation))

    def count_faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: what has gone wrong so far, as the driver and the router count it."""
        counts = super().count_faults()
        try:
            if counts and self.router is not None:
                counts["requests_retried"] = float(self.router.num_retries())
        except RuntimeError as error:  # a number alone: a busy machine may hold its answer up
            logger.warning("the router does not say how many requests it sent again: %s", error)
        return counts

    # ------------------------------------------------------------------------------------ recovery
    def finish_starts(self, with_evaluation: bool = False) -> bool:
        """Wait for the engines that replace dead ones, or leave them out. Returns whether there were any."""
        groups = self._recovering(with_evaluation)
        for group in groups:
            group.start_left_out()
        out = [group for group in groups if group.num_out]
        if out:
            self._say("waiting for engines that start again")
        for group in out:
            started = group.wait_for_new()
            if self.is_memory_away and group is self:
                get([self.engines[index].release_memory.remote(None) for index in started])
        if not (left_out := self.left_out_numbers) <= self._told_left_out:
            self._on_addresses()
        self._told_left_out = left_out
        return bool(out)

    def admit(self, with_evaluation: bool = False) -> int:
        """Send requests to restarted engines, which have the current weights. Returns their number."""
        num_back = sum(group.admit_new() for group in self._recovering(with_evaluation))
        if num_back:
            self._on_addresses()
        return num_back

    def targets(self) -> list[EngineTarget]:
        """The policy's engines as a weight push addresses them, and after these the ones that only evaluate."""
        restarts = [
            group.num_restarts[index] for group in (self, self.evaluation) for index in range(len(group.engines))
        ]
        targets, devices = [], self._launcher.bundles
        absent = self.left_out_numbers
        for index, engine in enumerate(self.engines + self.evaluation.engines):
            if index in absent:
                continue
            bundles = self._plan.all_engine_bundles[index]
            node = place_over(devices[bundle].node_id for bundle in bundles)
            parts = expert_parts(self._config, self._plan, index)
            addresses = tuple(sorted({devices[bundle].node_address for bundle in bundles}))
            target = EngineTarget(index, engine, node, bundles, restarts[index], parts, addresses=addresses)
            targets.append(target)
        return targets

    # ------------------------------------------------------------------------------------ memory
    def release_memory(self, tags: list[str] | None = None) -> None:
        """Give the engines' memory, or the part that `tags` name, back before the trainers work, where the two take
        turns. The engines are idle. Idempotent."""
        if not self._plan.engines_give_memory or self.is_memory_away:
            return
        with phase("make room"):
            if self.is_recovering:
                self.replace_dead(is_generating=False)
            self.finish_starts()  # a new engine loads where the trainers do not need the memory yet
            get([engine.flush_cache.remote() for engine in self.present])
            get([engine.release_memory.remote(tags) for engine in self.present])
            self.is_memory_away = True

    def resume_memory(self, tags: list[str], *, is_last: bool) -> None:
        """Take back a part of the memory; `is_last`: now all of it is here."""
        get([engine.resume_memory.remote(tags) for engine in self.present])
        self.is_memory_away = not is_last
