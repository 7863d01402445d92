"""--use-fault-tolerance: the engines of a run that die or hang, and new ones in their places.

An engine is in one of two states:

serving    in the router, with the current weights (or, before the first push, the checkpoint's)
out        its process was found dead or hung, was taken out of the router and ended; a new one starts meanwhile

Clients try again what was under way on an engine that is out, and the router sends it to one that serves.
`finish_starts` and `join` bring the new ones back, with a weight push between the two: no request reaches an engine
with old weights.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

import ray
from ray.actor import ActorHandle

from fusionrl.config.rollout import RolloutGroup
from fusionrl.engines.router import Router
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import gather, root_cause
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
