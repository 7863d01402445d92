"""`EnginePool`: the engines of a run, their addresses and memory, and with --use-fault-tolerance their replacement.

An engine that may be replaced is in one of two states:

serving    in the router, with the current weights (or, before the first push, the checkpoint's)
out        its process was found dead or hung, was taken out of the router and ended; a new one starts meanwhile

Clients try again what was under way on an engine that is out, and the router sends it to one that serves.
`finish_starts` and `admit` bring the new ones back, with a weight push between the two: no request reaches an engine
with old weights.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import ray
from ray.actor import ActorHandle

from fusionrl.base.wording import headline
from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.engines.router import Router
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget, place_over
from fusionrl.runtime.engine_specs import expert_parts
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.supervisor import root_cause
from fusionrl.weights.remote_calls import gather, get, wait

logger = logging.getLogger(__name__)

MAX_STARTS = 3  # failed starts in a row of one engine, before the run ends
CACHES = ["kv_cache", "cuda_graph"]  # SGLang's names for an engine's memory other than weights
_ANSWER_TIMEOUT_S = 15.0  # for the actor of an engine to answer, beyond what the server may take
_END_TIMEOUT_S = 20.0


METRICS = """
rollout/engines_died | engines | Engines found dead during the rollout. | --use-fault-tolerance
eval/engines_died | engines | Engines found dead during the evaluation. | --use-fault-tolerance
"""


class NoDevice(RuntimeError):
    """An engine has no device to start on."""


class RoutedEngines:
    """Engines behind a router of their own. With --use-fault-tolerance those that die are replaced."""

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        say: Callable[[str], None] = lambda text: None,
        check_stop: Callable[[], None] = lambda: None,
        *,
        router_name: str = "router",
        first: int = 0,
        may_lose_all: bool = False,
    ) -> None:
        """`say` shows progress; `check_stop` is called while waiting and may raise to end the wait.

        first         number of the engine at index 0, as the launcher and messages call it
        may_lose_all  the run continues without any of these engines until new ones have started
        """
        self._config, self._launcher, self._say, self._check_stop = config, launcher, say, check_stop
        self._router_name, self._first, self._may_lose_all = router_name, first, may_lose_all
        self.engines: list[ActorHandle] = []
        self.urls: list[str] = []
        self.router: Router | None = None
        self.is_recovering = False
        """Engines that die are replaced: with --use-fault-tolerance, once all have started."""
        self._starting: dict[int, ray.ObjectRef] = {}  # engine that is out -> reference of its new address
        self._started: list[int] = []  # engines that are out, and have started again
        self._failed_starts: Counter[int] = Counter()
        self._probes: dict[int, tuple[ray.ObjectRef, float]] = {}  # engine -> reference of a health check, since when
        self._next_probe = 0.0
        self.num_restarts: Counter[int] = Counter()
        """Engine -> how often another process took its place."""
        self.num_died = 0
        """Deaths so far."""

    # ------------------------------------------------------------------------------------ start and end
    def start_router(self) -> str:
        """Start the router, still empty; return its address, or "" without engines."""
        if not self.engines:
            return ""
        self.router = self._launcher.make_router(self._router_name)
        return self.router.start()

    def serve(self, urls: Iterable[str]) -> None:
        """Send requests to the engines, which are at `urls`."""
        self.urls = list(urls)
        for url in self.urls:
            assert self.router is not None
            self.router.add_worker(url, self._launcher.api_key)

    def check_router(self) -> None:
        """Start the router again where it is dead or hangs; raise with the end of its log where it may not."""
        if self.router is not None:
            self.router.check_alive()

    def end_router(self) -> None:
        if self.router is not None:
            self.router.shutdown()
        self.router, self.is_recovering = None, False

    def count_faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: the deaths so far."""
        return {"engines_died": float(self.num_died)} if self.is_recovering else {}

    # ------------------------------------------------------------------------------------ who is dead
    @property
    def num_out(self) -> int:
        """Engines that are not in the router."""
        return len(self._starting) + len(self._started)

    def forget_probes(self) -> None:
        """Before a round."""
        self._probes.clear()  # what is left of the round before: it may have met a paused engine
        self._next_probe = time.monotonic() + self._config.rollout.rollout_health_check_first_wait

    def replace_dead(self, is_generating: bool = True) -> int:
        """Replace every engine whose process is dead or, in a round, whose health check fails. Returns their number.
        Raises RuntimeError if no engine is left that serves; with what the last one died of."""
        serving = self._serving()
        dead = self._faults(serving)
        if is_generating:
            dead = self._without_token(serving) | dead
        return self._replace_all(dead, serving)

    def replace_silent(self, *, makes_tokens: bool) -> int:
        """Replace every engine that does not answer, or makes no token, within the time limit. Returns their number.

        Before a push, which would wait for an engine that has hung since its last token; and after one that failed.
        Raises RuntimeError, as `replace_dead`.
        """
        self._probes.clear()
        serving = self._serving()
        return self._replace_all(
            self._faults(serving, self._config.rollout.rollout_health_check_timeout, makes_tokens=makes_tokens), serving
        )

    def _serving(self) -> list[int]:
        """Return the engines that are not out; one that waits for its weights may die in the push that brings them."""
        return [index for index in range(len(self.engines)) if index not in self._starting]

    def _replace_all(self, dead: dict[int, Exception], serving: list[int]) -> int:
        if not serving:  # of those that may all be lost
            return 0
        # Also after a rollout's error, if the last engines died at the same time.
        if len(dead) == len(serving) and not self._may_lose_all:
            raise next(iter(dead.values()))
        for index, error in dead.items():
            self._take_out(index, error)
        return len(dead)

    def wait_for_new(self) -> list[int]:
        """Wait until every engine that is out has started, but is not in the router yet. Returns those that were new.
        Raises RuntimeError if one could not be started, `MAX_STARTS` times, or has no device."""
        limit_s = self._config.cluster.placement_timeout_s

        def check_start(index: int, since: float) -> None:
            self._check_stop()
            if time.monotonic() - since > limit_s and self._launcher.has_lost_engine("engine", self._first + index):
                raise NoDevice(
                    f"{self._name(index)}: its node is dead, and Ray gave it no other device within {limit_s:.0f} s"
                    " (--placement-timeout-s); add a node, or resume with a smaller --rollout-num-gpus"
                )

        for index in list(self._starting):
            while True:
                try:
                    check = partial(check_start, index, time.monotonic())
                    (self.urls[index],) = gather([self._starting[index]], check)
                    break
                except NoDevice:
                    raise
                except (ray.exceptions.RayError, RuntimeError) as error:
                    self._failed_starts[index] += 1
                    count = self._failed_starts[index]
                    if count >= MAX_STARTS:
                        raise RuntimeError(
                            f"{self._name(index)} died, and could not be started again ({count} tries):"
                            f" {root_cause(error)}"
                        ) from error
                    text = headline(str(root_cause(error)))
                    logger.warning("%s: start %d failed: %s", self._name(index), count, text)
                    self._replace(index)
            del self._failed_starts[index]
        new = list(self._starting)
        self._started += new
        self._starting.clear()
        return new

    def admit_new(self) -> int:
        """Send requests to the engines that `wait_for_new` waited for, which have the current weights; their number."""
        for index in self._started:
            assert self.router is not None
            self.router.add_worker(self.urls[index], self._launcher.api_key)
            self._say(f"{self._name(index)} is back")
        count = len(self._started)
        self._started.clear()
        return count

    def _name(self, index: int) -> str:
        return f"engine {self._first + index}"

    def _faults(
        self, serving: list[int], timeout_s: float | None = None, *, makes_tokens: bool = True
    ) -> dict[int, Exception]:
        """Return the engines without a process; with `timeout_s` also those that do not answer within it."""
        refs = {self.engines[i].fault.remote(timeout_s, makes_tokens=makes_tokens): i for i in serving}
        limit_s = (timeout_s or 0.0) + _ANSWER_TIMEOUT_S
        done = wait(list(refs), num_returns=len(refs), timeout=limit_s)[0] if refs else []
        faults = {refs[ref]: error for ref in done if (error := _error_of(ref)) is not None}
        silent = [refs[ref] for ref in refs.keys() - set(done)] if timeout_s is not None else []
        return faults | {index: self._actor_is_silent(index) for index in silent}

    def _without_token(self, serving: list[int]) -> dict[int, Exception]:
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + self._config.rollout.rollout_health_check_interval
            for index in serving:
                if index not in self._probes:
                    self._probes[index] = (
                        self.engines[index].fault.remote(self._config.rollout.rollout_health_check_timeout),
                        now,
                    )
        failed: dict[int, Exception] = {}
        for index, (ref, since) in list(self._probes.items()):
            if wait([ref], timeout=0)[0]:
                del self._probes[index]
                if (error := _error_of(ref)) is not None:
                    failed[index] = error
            elif now - since > self._config.rollout.rollout_health_check_timeout + _ANSWER_TIMEOUT_S:
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
        assert self.router is not None
        self.router.remove_worker(self.urls[index])
        self._probes.pop(index, None)
        if index in self._started:
            self._started.remove(index)
        self.num_restarts[index] += 1
        self._replace(index)

    def _replace(self, index: int) -> None:
        old = self.engines[index]
        wait([old.shutdown.remote(0.0)], timeout=_END_TIMEOUT_S)
        ray.kill(old)
        self.engines[index] = self._launcher.make_engine("engine", self._first + index)
        self._starting[index] = self.engines[index].start.remote()


def _error_of(ref: ray.ObjectRef) -> Exception | None:
    """Return the fault that a finished call of `EngineActor.fault` reported; a dead actor is a dead engine."""
    try:
        fault = get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None if fault is None else RuntimeError(fault)


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
        super().__init__(*group)
        self._plan, self._on_addresses = plan, on_addresses
        self.router_url = ""
        self.evaluation = RoutedEngines(*group, router_name="eval-router", first=plan.num_engines, may_lose_all=True)
        self._scorers: dict[str, list[ActorHandle]] = {}  # role → engines that only read, and get no weights
        self._starts: list[ray.ObjectRef] = []  # of the addresses of all engines
        self.is_memory_away = False
        """The engines gave their memory back."""
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
        """All engines, in the order in which they were made."""
        scorers = [engine for engines in self._scorers.values() for engine in engines]
        return self.engines + scorers + self.evaluation.engines

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
            wait(stops, num_returns=len(stops), timeout=_END_TIMEOUT_S)

    def make_way(self) -> None:
        """At the end of a run, end the servers with which trainers take turns: they have memory that the trainers need
        to save, and may be at work."""
        if self._plan.engines_give_memory and self.urls:
            self._died_before = self.find_dead()
            self.urls = []
            stops = [engine.shutdown.remote() for engine in self.engines]
            wait(stops, num_returns=len(stops), timeout=_END_TIMEOUT_S)

    # ------------------------------------------------------------------------------------ supervision
    def begin_round(self) -> None:
        for group in self._recovering():
            group.forget_probes()

    def check(self, is_generating: bool) -> None:
        """Raise with the end of its log when a server is dead; with --use-fault-tolerance replace it. A router that is
        dead is started again (--max-restarts).

        Colocated on GPUs a new engine has no room while the trainers work: there a death ends the run even so.
        """
        self.check_router()
        self.evaluation.check_router()
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
        for router in filter(None, (self.router, self.evaluation.router)):
            if (fault := router.find_fault()) is not None:
                return fault
        try:
            checks = [engine.check_alive.remote() for engine in self._lasting()]
            get(wait(checks, num_returns=len(checks), timeout=_END_TIMEOUT_S)[0] if checks else [])
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
        """Wait for the engines that replace dead ones. Returns whether there were any."""
        out = [group for group in self._recovering(with_evaluation) if group.num_out]
        if out:
            self._say("waiting for engines that start again")
        for group in out:
            started = group.wait_for_new()
            if self.is_memory_away and group is self:
                get([self.engines[index].release_memory.remote(None) for index in started])
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
        for index, engine in enumerate(self.engines + self.evaluation.engines):
            bundles = self._plan.all_engine_bundles[index]
            node = place_over(devices[bundle].node_id for bundle in bundles)
            parts = expert_parts(self._config, self._plan, index)
            targets.append(EngineTarget(index, engine, node, bundles, restarts[index], parts))
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
            get([engine.flush_cache.remote() for engine in self.engines])
            get([engine.release_memory.remote(tags) for engine in self.engines])
            self.is_memory_away = True

    def resume_memory(self, tags: list[str], *, is_last: bool) -> None:
        """Take back a part of the memory; `is_last`: now all of it is here."""
        get([engine.resume_memory.remote(tags) for engine in self.engines])
        self.is_memory_away = not is_last
