"""`EnginePool`: the engines of a run, their addresses and memory, and with --use-fault-tolerance their `Recovery`.

For `Recovery` an engine is in one of two states:

serving    in the router, with the current weights (or, before the first push, the checkpoint's)
out        its process was found dead or hung, was taken out of the router and ended; a new one starts meanwhile

Clients try again what was under way on an engine that is out, and the router sends it to one that serves.
`finish_starts` and `join` bring the new ones back, with a weight push between the two: no request reaches an engine
with old weights.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import ray
from ray.actor import ActorHandle

from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.config.rollout import RolloutGroup
from fusionrl.engines.router import Router
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget, join_nodes
from fusionrl.runtime.engine_specs import expert_parts
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.supervisor import gather, root_cause
from fusionrl.weights.remote_calls import get, wait

logger = logging.getLogger(__name__)

MAX_STARTS = 3  # failed starts in a row of one engine, before the run ends
_ANSWER_TIMEOUT_S = 15.0  # for the actor of an engine to answer, beyond what the server may take
_END_TIMEOUT_S = 20.0


class Recovery:
    """Watches the engines of an `EnginePool`, and replaces actors and addresses in the pool's own lists."""

    def __init__(
        self,
        engines: list[ActorHandle],
        urls: list[str],
        router: Router,
        launcher: Launcher,
        rollout: RolloutGroup,
        say: Callable[[str], None],
        *,
        first: int = 0,
        may_lose_all: bool = False,
    ) -> None:
        """`rollout` has the flags of health checks.

        first         number of the engine at index 0, as the launcher and messages call it
        may_lose_all  the run continues without any of these engines until new ones have started
        """
        self._engines, self._urls, self._router, self._launcher, self._say = engines, urls, router, launcher, say
        self._first, self._may_lose_all = first, may_lose_all
        self._interval_s = rollout.rollout_health_check_interval
        self._timeout_s = rollout.rollout_health_check_timeout
        self._first_wait_s = rollout.rollout_health_check_first_wait
        self._starting: dict[int, ray.ObjectRef] = {}  # engine that is out -> reference of its new address
        self._started: list[int] = []  # engines that are out, and have started again
        self._failed_starts: Counter[int] = Counter()
        self._probes: dict[int, tuple[ray.ObjectRef, float]] = {}  # engine -> reference of a health check, since when
        self._next_probe = 0.0
        self.num_restarts: Counter[int] = Counter()
        """Engine -> how often another process took its place."""
        self.num_died = 0
        """Deaths so far."""

    @property
    def num_out(self) -> int:
        """Engines that are not in the router."""
        return len(self._starting) + len(self._started)

    def begin_round(self) -> None:
        self._probes.clear()  # what is left of the round before: it may have met a paused engine
        self._next_probe = time.monotonic() + self._first_wait_s

    def check(self, is_generating: bool = True) -> int:
        """Take out every engine whose process is dead or, in a round, whose health check fails. Returns their number.
        Raises RuntimeError if no engine is left that serves; with what the last one died of."""
        serving = self._serving()
        dead = self._faults(serving)
        if is_generating:
            dead = self._without_token(serving) | dead
        return self._take_all_out(dead, serving)

    def check_answers(self, *, makes_tokens: bool) -> int:
        """Take out every engine that does not answer, or makes no token, within the time limit. Returns their number.

        Before a push, which would wait for an engine that has hung since its last token; and after one that failed.
        Raises RuntimeError, as `check`.
        """
        self._probes.clear()
        serving = self._serving()
        return self._take_all_out(self._faults(serving, self._timeout_s, makes_tokens=makes_tokens), serving)

    def _serving(self) -> list[int]:
        """Return the engines that are not out; one that waits for its weights may die in the push that brings them."""
        return [index for index in range(len(self._engines)) if index not in self._starting]

    def _take_all_out(self, dead: dict[int, Exception], serving: list[int]) -> int:
        if not serving:  # of those that may all be lost
            return 0
        # Also after a rollout's error, if the last engines died at the same time.
        if len(dead) == len(serving) and not self._may_lose_all:
            raise next(iter(dead.values()))
        for index, error in dead.items():
            self._take_out(index, error)
        return len(dead)

    def finish_starts(self, check_stop: Callable[[], None]) -> list[int]:
        """Wait until every engine that is out has started, but is not in the router yet. Returns those that were new.
        Raises RuntimeError if one could not be started, `MAX_STARTS` times."""
        for index in list(self._starting):
            while True:
                try:
                    (self._urls[index],) = gather([self._starting[index]], check_stop)
                    break
                except (ray.exceptions.RayError, RuntimeError) as error:
                    self._failed_starts[index] += 1
                    count = self._failed_starts[index]
                    if count >= MAX_STARTS:
                        raise RuntimeError(
                            f"{self._name(index)} died, and could not be started again ({count} tries):"
                            f" {root_cause(error)}"
                        ) from error
                    logger.warning("%s: start %d failed: %s", self._name(index), count, root_cause(error))
                    self._replace(index)
            del self._failed_starts[index]
        new = list(self._starting)
        self._started += new
        self._starting.clear()
        return new

    def join(self) -> None:
        """Put the engines that `finish_starts` waited for into the router: they have the current weights."""
        for index in self._started:
            self._router.add_worker(self._urls[index], self._launcher.api_key)
            self._say(f"{self._name(index)} is back")
        self._started.clear()

    def _name(self, index: int) -> str:
        return f"engine {self._first + index}"

    # ------------------------------------------------------------------------------------ who is dead
    def _faults(
        self, serving: list[int], timeout_s: float | None = None, *, makes_tokens: bool = True
    ) -> dict[int, Exception]:
        """Return the engines without a process; with `timeout_s` also those that do not answer within it."""
        refs = {self._engines[i].fault.remote(timeout_s, makes_tokens=makes_tokens): i for i in serving}
        limit_s = (timeout_s or 0.0) + _ANSWER_TIMEOUT_S
        done = wait(list(refs), num_returns=len(refs), timeout=limit_s)[0] if refs else []
        faults = {refs[ref]: error for ref in done if (error := _error_of(ref)) is not None}
        silent = [refs[ref] for ref in refs.keys() - set(done)] if timeout_s is not None else []
        return faults | {index: self._actor_is_silent(index) for index in silent}

    def _without_token(self, serving: list[int]) -> dict[int, Exception]:
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + self._interval_s
            for index in serving:
                if index not in self._probes:
                    self._probes[index] = (self._engines[index].fault.remote(self._timeout_s), now)
        failed: dict[int, Exception] = {}
        for index, (ref, since) in list(self._probes.items()):
            if wait([ref], timeout=0)[0]:
                del self._probes[index]
                if (error := _error_of(ref)) is not None:
                    failed[index] = error
            elif now - since > self._timeout_s + _ANSWER_TIMEOUT_S:
                failed[index] = self._actor_is_silent(index)
        return failed

    def _actor_is_silent(self, index: int) -> RuntimeError:
        return RuntimeError(f"{self._name(index)}: its actor does not answer")

    # ------------------------------------------------------------------------------------ out and in again
    def _take_out(self, index: int, error: Exception) -> None:
        """Take an engine out of the router, so that no retry reaches it, then end its process, which breaks the
        connections of all requests that still wait for it."""
        self.num_died += 1
        if_any = ", if there are any" if self._may_lose_all else ""
        self._say(f"{self._name(index)} is dead; its requests go to the others{if_any}, and a new one starts")
        logger.warning("%s is taken out: %s", self._name(index), error)
        self._router.remove_worker(self._urls[index])
        self._probes.pop(index, None)
        if index in self._started:
            self._started.remove(index)
        self.num_restarts[index] += 1
        self._replace(index)

    def _replace(self, index: int) -> None:
        old = self._engines[index]
        wait([old.shutdown.remote(0.0)], timeout=_END_TIMEOUT_S)
        ray.kill(old)
        self._engines[index] = self._launcher.make_engine("engine", self._first + index)
        self._starting[index] = self._engines[index].start.remote()


def _error_of(ref: ray.ObjectRef) -> Exception | None:
    """Return the fault that a finished call of `EngineActor.fault` reported; a dead actor is a dead engine."""
    try:
        fault = get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None if fault is None else RuntimeError(fault)


CACHES = ["kv_cache", "cuda_graph"]  # SGLang's names for an engine's memory other than weights
_STOP_TIMEOUT_S = 20.0


METRICS = """
rollout/engines_died | engines | Engines found dead during the rollout. | --use-fault-tolerance
eval/engines_died | engines | Engines found dead during the evaluation. | --use-fault-tolerance
"""


class RoutedEngines:
    """Engines behind a router of their own; with --use-fault-tolerance those that die are replaced."""

    def __init__(self, launcher: Launcher, router_name: str, first: int) -> None:
        """`first`: number of the first engine."""
        self._launcher, self._router_name, self._first = launcher, router_name, first
        self.engines: list[ActorHandle] = []
        self.urls: list[str] = []
        self.router: Router | None = None
        self.recovery: Recovery | None = None  # --use-fault-tolerance

    def make(self, num_engines: int) -> None:
        """Make the actors, whose servers are not started yet."""
        for number in range(self._first, self._first + num_engines):
            self.engines.append(self._launcher.make_engine("engine", number))

    def start_router(self) -> str:
        """Start the router, still empty; return its address, or "" without engines."""
        if not self.engines:
            return ""
        self.router = self._launcher.make_router(self._router_name)
        return self.router.start()

    def add(self, urls: Iterable[str]) -> None:
        self.urls = list(urls)
        for url in self.urls:
            assert self.router is not None
            self.router.add_worker(url, self._launcher.api_key)

    def replace_dead(self, rollout: RolloutGroup, say: Callable[[str], None], *, may_lose_all: bool = False) -> None:
        """From now on, replace engines that die. `may_lose_all`: the run continues even if all of them do."""
        if self.router is not None:
            self.recovery = Recovery(
                *(self.engines, self.urls, self.router, self._launcher, rollout, say),
                first=self._first,
                may_lose_all=may_lose_all,
            )

    def count_faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: the deaths so far."""
        return {} if self.recovery is None else {"engines_died": float(self.recovery.num_died)}

    def check_router(self) -> None:
        """Raise with the end of its log when the router is dead."""
        if self.router is not None:
            self.router.check_alive()

    def end_router(self) -> None:
        if self.router is not None:
            self.router.shutdown()
        self.router = self.recovery = None


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
        super().__init__(launcher, "router", 0)
        self._config, self._plan = config, plan
        self._say, self._check_stop, self._on_addresses = say, check_stop, on_addresses
        self.router_url = ""
        self.evaluation = RoutedEngines(launcher, "eval-router", plan.num_engines)
        self._scorers: dict[str, list[ActorHandle]] = {}  # role → engines that only read, and get no weights
        self._starts: list[ray.ObjectRef] = []  # of the addresses of all engines
        self.is_memory_away = False
        """The engines gave their memory back."""

    # ------------------------------------------------------------------------------------ start and end
    def start(self) -> None:
        """Begin to start every engine; see `finish_start`."""
        if not self._plan.num_engines:
            return
        self.make(self._plan.num_engines)
        for scorer in self._plan.scorers:
            indices = range(len(scorer.bundles))
            self._scorers[scorer.role] = [self._launcher.make_engine(scorer.role, index) for index in indices]
        self.evaluation.make(len(self._plan.eval_bundles))
        self._starts = [engine.start.remote() for engine in self.everyone]

    def finish_start(self) -> EngineEndpoints:
        """Start the router, and wait until it has every engine of the policy. Returns all addresses."""
        if not self._starts:
            return EngineEndpoints()
        self.router_url, eval_router_url = self.start_router(), self.evaluation.start_router()
        urls = iter(gather(self._starts, self._check_stop))
        policy_urls = [next(urls) for _ in self.engines]
        scorer_urls = {role: tuple(next(urls) for _ in engines) for role, engines in self._scorers.items()}
        self.add(policy_urls)  # first: with the policy's addresses `find_dead` asks all servers
        self.evaluation.add(urls)
        if self._config.rollout.use_fault_tolerance:
            self.replace_dead(self._config.rollout, self._say)
            self.evaluation.replace_dead(self._config.rollout, self._say, may_lose_all=True)
        return EngineEndpoints(
            self.router_url,
            tuple(self.urls),
            self._launcher.api_key,
            rm_urls=scorer_urls.get("reward-model", ()),
            teacher_urls=scorer_urls.get("teacher", ()),
            eval_router_url=eval_router_url,
            eval_urls=tuple(self.evaluation.urls),
        )

    def _recoveries(self, with_evaluation: bool = True) -> list[Recovery]:
        return [*filter(None, (self.recovery, self.evaluation.recovery if with_evaluation else None))]

    @property
    def everyone(self) -> list[ActorHandle]:
        """All engines, in the order in which they were made."""
        scorers = [engine for engines in self._scorers.values() for engine in engines]
        return self.engines + scorers + self.evaluation.engines

    def _lasting(self) -> list[ActorHandle]:
        """The engines that are not replaced when they die."""
        if self.recovery is None:
            return self.everyone
        return [engine for engines in self._scorers.values() for engine in engines]

    def shutdown(self) -> None:
        """End every server, and the router; gives up after some seconds. The actors live on. Idempotent."""
        stops = [engine.shutdown.remote() for engine in self.everyone]
        self.end_router()
        self.evaluation.end_router()
        if stops:
            wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)

    # ------------------------------------------------------------------------------------ supervision
    def begin_round(self) -> None:
        for recovery in self._recoveries():
            recovery.begin_round()

    def check(self, is_generating: bool) -> None:
        """Raise with the end of its log when a server or the router is dead; with --use-fault-tolerance replace it.

        Colocated on GPUs a new engine has no room while the trainers work: there a death ends the run even so.
        """
        self.check_router()
        self.evaluation.check_router()
        if self.recovery is None or self.is_memory_away:
            get([engine.check_alive.remote() for engine in self.everyone])
            return
        for recovery in self._recoveries():
            recovery.check(is_generating)
        get([engine.check_alive.remote() for engine in self._lasting()])

    def find_dead(self) -> RuntimeError | None:
        """After a failure: return the error of a dead server or router. Replaces none."""
        if not self.urls:  # the start failed
            return None
        try:
            self.check_router()
            self.evaluation.check_router()
            checks = [engine.check_alive.remote() for engine in self._lasting()]
            get(wait(checks, num_returns=len(checks), timeout=_STOP_TIMEOUT_S)[0] if checks else [])
        except RuntimeError as error:
            return error
        except ray.exceptions.RayError as error:  # an actor that is dead, or cannot be asked: the registry knows
            logger.debug("the engines cannot be asked: %s", error)
        return None

    def check_answers(self, with_evaluation: bool = False, *, makes_tokens: bool = False) -> int:
        """With --use-fault-tolerance, before a push, or with `makes_tokens` after one that failed: replace the engines
        that are dead, or do not answer, or make no token. Returns their number."""
        recoveries = self._recoveries(with_evaluation)
        return sum(recovery.check_answers(makes_tokens=makes_tokens) for recovery in recoveries)

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
    @property
    def is_recovering(self) -> bool:
        """Return whether engines that die are replaced (--use-fault-tolerance)."""
        return self.recovery is not None

    @property
    def num_out(self) -> int:
        """Engines of the policy that died and do not serve yet."""
        return self.recovery.num_out if self.recovery is not None else 0

    def finish_starts(self, with_evaluation: bool = False) -> bool:
        """Wait for the engines that replace dead ones. Returns whether there were any."""
        out = [recovery for recovery in self._recoveries(with_evaluation) if recovery.num_out]
        if out:
            self._say("waiting for engines that start again")
        for recovery in out:
            started = recovery.finish_starts(self._check_stop)
            if self.is_memory_away and recovery is self.recovery:
                get([self.engines[index].release_memory.remote(None) for index in started])
        return bool(out)

    def join(self, with_evaluation: bool = False) -> int:
        """Send requests to restarted engines, which have the current weights. Returns their number."""
        out = [recovery for recovery in self._recoveries(with_evaluation) if recovery.num_out]
        num_back = sum(recovery.num_out for recovery in out)
        for recovery in out:
            recovery.join()
        if out:
            self._on_addresses()
        return num_back

    def targets(self) -> list[EngineTarget]:
        """The policy's engines as a weight push addresses them, and after these the ones that only evaluate."""
        bundles, restarts = self._plan.all_engine_bundles, dict[int, int]()
        for recovery, first in ((self.recovery, 0), (self.evaluation.recovery, self._plan.num_engines)):
            restarts |= {first + index: count for index, count in recovery.num_restarts.items()} if recovery else {}
        places_of = self._launcher.bundles
        nodes = [join_nodes(places_of[place].node_id for place in places) for places in bundles]
        return [
            EngineTarget(
                index, engine, node, places, restarts.get(index, 0), expert_parts(self._config, self._plan, index)
            )
            for index, (engine, node, places) in enumerate(
                zip(self.engines + self.evaluation.engines, nodes, bundles, strict=True)
            )
        ]

    # ------------------------------------------------------------------------------------ memory
    def release_memory(self, tags: list[str] | None = None) -> None:
        """Give the engines' memory, or the part that `tags` name, back before the trainers work, where the two take
        turns. The engines are idle. Idempotent."""
        if not self._plan.engines_give_memory or self.is_memory_away:
            return
        if self.recovery is not None:
            self.recovery.check(is_generating=False)
        self.finish_starts()  # a new engine loads where the trainers do not need the memory yet
        get([engine.flush_cache.remote() for engine in self.engines])
        get([engine.release_memory.remote(tags) for engine in self.engines])
        self.is_memory_away = True

    def resume_memory(self, tags: list[str], *, is_last: bool) -> None:
        """Take back a part of the memory; `is_last`: now all of it is here."""
        get([engine.resume_memory.remote(tags) for engine in self.engines])
        self.is_memory_away = not is_last
