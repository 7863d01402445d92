"""`RoutedEngines`: engines behind a router, and with --use-fault-tolerance their replacement.

An engine that may be replaced is in one of three states:

serving    in the router, with the current weights (or, before the first push, the checkpoint's)
out        its process was found dead or hung, was taken out of the router and ended; a new one starts meanwhile
left out   its node is dead, and Ray has no other device so far: the others serve alone, until Ray has one

Clients try again what was under way on an engine that is out, and the router sends it to one that serves.
`finish_starts` and `admit` bring the new ones back, with a weight push between the two: no request reaches an engine
with old weights.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import ray
from ray.actor import ActorHandle

from fusionrl.base.wording import counted, headline
from fusionrl.config.config import Config
from fusionrl.engines.router import Router
from fusionrl.runtime.launcher import REPLACED_S, Launcher
from fusionrl.runtime.supervisor import root_cause
from fusionrl.weights.remote_calls import gather, get, wait

logger = logging.getLogger(__name__)

MAX_STARTS = 3  # failed starts in a row of one engine, before the run ends
_ANSWER_TIMEOUT_S = 15.0  # for the actor of an engine to answer, beyond what the server may take
END_TIMEOUT_S = 20.0  # for a server to end


METRICS = """
rollout/engines_died | engines | Engines found dead during the rollout. | --use-fault-tolerance
eval/engines_died | engines | Engines found dead during the evaluation. | --use-fault-tolerance
"""


class NoDevice(RuntimeError):
    """An engine has no device to start on."""


class Health:
    """Asks engines whether they live, and in rounds whether they make tokens."""

    def __init__(self, config: Config, engines: list[ActorHandle], name: Callable[[int], str]) -> None:
        """`engines` may change; `name(index)` is one's name in messages."""
        self._config, self._engines, self._name = config, engines, name
        self._probes: dict[int, tuple[ray.ObjectRef, float]] = {}  # engine -> reference of a health check, since when
        self._next_probe = 0.0

    def begin_round(self) -> None:
        """Leave the engines alone for a while."""
        self._probes.clear()  # what is left of the round before: it may have met a paused engine
        self._next_probe = time.monotonic() + self._config.rollout.rollout_health_check_first_wait

    def forget(self, index: int | None = None) -> None:
        """Forget the check of an engine that is under way, or all."""
        for each in list(self._probes) if index is None else [index]:
            self._probes.pop(each, None)

    def faults(
        self, serving: Sequence[int], timeout_s: float | None = None, *, makes_tokens: bool = True
    ) -> dict[int, Exception]:
        """Return the engines without a process; with `timeout_s` also those that do not answer within it."""
        refs = {self._engines[i].fault.remote(timeout_s, makes_tokens=makes_tokens): i for i in serving}
        limit_s = (timeout_s or 0.0) + _ANSWER_TIMEOUT_S
        done = wait(list(refs), num_returns=len(refs), timeout=limit_s)[0] if refs else []
        faults = {refs[ref]: error for ref in done if (error := _error_of(ref)) is not None}
        silent = [refs[ref] for ref in refs.keys() - set(done)] if timeout_s is not None else []
        return faults | {index: self._is_silent(index) for index in silent}

    def without_token(self, serving: Sequence[int]) -> dict[int, Exception]:
        """Begin health checks where they are due; return the engines whose last one failed."""
        now, limit_s = time.monotonic(), self._config.rollout.rollout_health_check_timeout
        if now >= self._next_probe:
            self._next_probe = now + self._config.rollout.rollout_health_check_interval
            for index in serving:
                if index not in self._probes:
                    self._probes[index] = (self._engines[index].fault.remote(limit_s), now)
        failed: dict[int, Exception] = {}
        for index, (ref, since) in list(self._probes.items()):
            if wait([ref], timeout=0)[0]:
                del self._probes[index]
                if (error := _error_of(ref)) is not None:
                    failed[index] = error
            elif now - since > limit_s + _ANSWER_TIMEOUT_S:
                failed[index] = self._is_silent(index)
        return failed

    def _is_silent(self, index: int) -> RuntimeError:
        return RuntimeError(f"{self._name(index)}: its actor does not answer")


def _error_of(ref: ray.ObjectRef) -> Exception | None:
    """Return the fault that a finished call of `EngineActor.fault` reported; a dead actor is a dead engine."""
    try:
        fault = get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None if fault is None else RuntimeError(fault)


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
        takes_back: bool = True,
        work_of: Callable[[int], str] = lambda index: "",
    ) -> None:
        """`say` shows progress; `check_stop` is called while waiting and may raise to end the wait.

        first         number of the engine at index 0, as the launcher and messages call it
        may_lose_all  the run continues without any of these engines until new ones have started
        takes_back    an engine that was left out may start later
        work_of       index → what an engine does, where they do not all do the same
        """
        self._config, self._launcher, self._say, self._check_stop = config, launcher, say, check_stop
        self._router_name, self._first, self._may_lose_all = router_name, first, may_lose_all
        self._takes_back, self._work_of = takes_back, work_of
        self.engines: list[ActorHandle] = []
        self.urls: list[str] = []
        self.router: Router | None = None
        self.is_recovering = False
        """Engines that die are replaced: with --use-fault-tolerance, once all have started."""
        self._starting: dict[int, ray.ObjectRef] = {}  # engine that is out -> reference of its new address
        self._started: list[int] = []  # engines that are out, and have started again
        self.left_out: set[int] = set()
        """Engines whose node died, and for which Ray has no other device so far. They have no actor."""
        self._misplaced: set[int] = set()  # engines left out whose devices are there, and do not fit
        self._failed_starts: Counter[int] = Counter()
        self.health = Health(config, self.engines, self._name)
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
        """Engines that are not in the router, but for those that are left out."""
        return len(self._starting) + len(self._started)

    @property
    def addresses(self) -> list[str]:
        """The engines' addresses, without those that are left out."""
        return [url for index, url in enumerate(self.urls) if index not in self.left_out]

    @property
    def present(self) -> list[ActorHandle]:
        """The engines, without those that are left out."""
        return [engine for index, engine in enumerate(self.engines) if index not in self.left_out]

    def _name(self, index: int) -> str:
        return f"engine {self._first + index}"

    def replace_dead(self, is_generating: bool = True) -> int:
        """Replace every engine whose process is dead or, in a round, whose health check fails. Returns their number.
        Raises RuntimeError if no engine is left that serves; with what the last one died of."""
        serving = self._serving()
        dead = self.health.faults(serving)
        if is_generating:
            dead = self.health.without_token(serving) | dead
        return self._replace_all(dead, serving)

    def replace_silent(self, *, makes_tokens: bool) -> int:
        """Replace every engine that does not answer, or makes no token, within the time limit. Returns their number.

        Before a push, which would wait for an engine that has hung since its last token; and after one that failed.
        Raises RuntimeError, as `replace_dead`.
        """
        self.health.forget()
        serving, limit_s = self._serving(), self._config.rollout.rollout_health_check_timeout
        return self._replace_all(self.health.faults(serving, limit_s, makes_tokens=makes_tokens), serving)

    def _serving(self, stands_in_for: int | None = None) -> list[int]:
        """Return the engines that are neither starting nor left out; with `stands_in_for`, those that do its work.

        One that waits for its weights is among them: it may die in the push that brings them.
        """
        out = {*self._starting, *self.left_out}
        work = None if stands_in_for is None else self._work_of(stands_in_for)
        return [i for i in range(len(self.engines)) if i not in out and work in (None, self._work_of(i))]

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
        One without a device is left out. Raises RuntimeError if one could not be started, `MAX_STARTS` times, or has no
        device while no other engine serves."""
        without_device: dict[int, float] = {}  # engine → since when

        def check_start(index: int) -> None:
            self._check_stop()
            if not self._has_lost(index):
                without_device.pop(index, None)
                return
            may_go_on = self._takes_back and self._serving(index)
            limit_s = REPLACED_S if may_go_on else self._config.cluster.placement_timeout_s
            if time.monotonic() - without_device.setdefault(index, time.monotonic()) > limit_s:
                raise NoDevice(
                    f"{self._name(index)}: a node of it is dead, and Ray gave no other device within {limit_s:.0f} s"
                )

        new = []
        # Those without a device last: by then others have started that may do their work.
        for index in sorted(self._starting, key=self._has_lost):
            while True:
                try:
                    (self.urls[index],) = gather([self._starting[index]], partial(check_start, index))
                    del self._starting[index]
                    self._started.append(index)
                    new.append(index)
                    break
                except NoDevice as error:
                    if not self._serving(index):
                        cure = "add a node, or resume with a smaller --rollout-num-gpus"
                        raise NoDevice(f"{error} (--placement-timeout-s); {cure}") from None
                    self._launcher.end_engine(self.engines[index])
                    self._leave_out(index, str(error))
                    break
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
                    if index in self.left_out:
                        break
            self._failed_starts.pop(index, None)
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
        self.health.forget(index)
        if index in self._started:
            self._started.remove(index)
        self.num_restarts[index] += 1
        self._replace(index)

    def _replace(self, index: int) -> None:
        """Start another engine in place of a dead one, or of one that is left out."""
        if index not in self.left_out:
            old = self.engines[index]
            wait([old.shutdown.remote(0.0)], timeout=END_TIMEOUT_S)
            self._launcher.end_engine(old)
        try:
            self.engines[index] = self._launcher.make_engine("engine", self._first + index)
        except ValueError as error:  # Ray has placed its devices in another way than its own were
            if index in self.left_out or self._serving(index) in ([], [index]):
                raise
            self._leave_out(index, f"{self._name(index)}: {error}")
            return
        self.left_out.discard(index)
        self._misplaced.discard(index)
        self._starting[index] = self.engines[index].start.remote()

    def _leave_out(self, index: int, reason: str) -> None:
        """Continue without an engine, whose actors have ended."""
        self._starting.pop(index, None)
        self.left_out.add(index)
        later = ", and takes this one back when Ray has a device" if self._takes_back else ""
        serving = counted(len(self._serving()), "engine")
        logger.warning("%s; the run continues with %s%s", reason, serving, later)

    def start_left_out(self) -> None:
        """Start the engines that were left out, and for which Ray has devices now, if they can be taken back."""
        for index in sorted(self.left_out) if self._takes_back else ():
            try:
                if not self._has_lost(index):
                    self._replace(index)
            except (ValueError, ray.exceptions.RayError) as error:  # of devices that do not fit, or do not answer
                if index not in self._misplaced:
                    logger.warning("%s stays left out: %s", self._name(index), error)
                self._misplaced.add(index)

    def _has_lost(self, index: int) -> bool:
        return self._launcher.has_lost_engine("engine", self._first + index)
