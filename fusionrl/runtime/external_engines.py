"""`ExternalEngines`: engines that others start and end, and that work for the run meanwhile.

They are named by --rollout-external-engine-addrs and by `engines.txt` in the run's folder, which may change at any time
(`fusionrl.observe.engine_list`). The states of one:

joining   its address is new; it is asked what it is
ready     it fits, and waits for the next weight push; no request goes to it before
serving   in the router, with the current weights
leaving   out of the router; it answers what it has, and is pushed to as long as it works
gone      it has been let go, as the engine that it was

One that dies is lost, and the others get its requests; where one that has just joined breaks its first push, it is lost
and the push is made again. The run does not end for a engine, as it has engines of its own, but where memory is shared:
there a push cannot be made again.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.actor import ActorHandle

from fusionrl.config.config import Config
from fusionrl.engines.external_engine import AttachedEngine, EngineRequirements, ExternalEngineFacts, host_of
from fusionrl.engines.router import Router
from fusionrl.observe.engine_list import EngineState, add_wanted, read_wanted, write_states
from fusionrl.plan.plan import Plan
from fusionrl.plan.push import EngineTarget
from fusionrl.runtime.actor_process import ProcessSettings, log_to
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.engine_specs import TORCH_DTYPES, policy_server_args
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import root_cause

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
_PROBE_INTERVAL_S = 5.0
_MISSING_S = 0.5  # a list that somebody writes in place is read empty, or in part, for a moment
_PENDING = object()
_NEEDED = ("disable_radix_cache", "enable_return_routed_experts", "incremental_streaming_output")
"""Fields of SGLang's that the run sets on its own engines, and without which it gets wrong answers."""
_ALIKE = ("quantization", "context_length", "allow_auto_truncate")
"""Of `fusionrl.config.engine_groups.ALIKE`, those that concern engines of others as well."""


@dataclass
class ExternalEngine:
    """One engine of somebody else's."""

    index: int
    url: str
    actor: ActorHandle
    joined: ray.ObjectRef
    state: str = "joining"
    found: ExternalEngineFacts | None = None
    asked: ray.ObjectRef | None = None  # whether it lives, or how many requests it has
    asked_at: float = field(default=0.0)
    missing_since: float | None = None  # when the list was first read without it

    def target(self) -> EngineTarget:
        """The engine as a weight push addresses it; its devices have no number here."""
        assert self.found is not None
        ranks = (-1,) * self.found.tp_size
        host = host_of(self.url)
        return EngineTarget(self.index, self.actor, f"external {host}", ranks, 0, self.found.ep_size, host)


class ExternalEngines:
    """The list of wanted engines, made true; called from the driver's thread alone."""

    def __init__(
        self,
        run_dir: Path,
        first: int,
        make: Callable[[int, str], ActorHandle],
        join: Callable[[ActorHandle], ray.ObjectRef],
        *,
        api_key: str | None,
        pushes: bool,
        say: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        """Take the run's settings.

        Args:
            run_dir: the folder with the list
            first: number of the first engine; the run's own engines come before
            make: makes the actor of a engine, of a number and an address
            join: begins to ask a engine what it is
            api_key: of the engines
            pushes: whether weights are pushed in this run; without, `join` refuses a engine with others than the run's
            say: is told what becomes of engines
            on_change: is called when other engines are serving than before
        """
        self._run_dir, self._make, self._join = run_dir, make, join
        self._api_key, self._pushes, self._say, self._on_change = api_key, pushes, say, on_change
        self._next = first
        self._engines: list[ExternalEngine] = []
        self._past: dict[str, EngineState] = {}  # address → what became of one that is no engine any more
        self._refused: set[str] = set()  # still in the list
        self._told_errors: set[str] = set()
        self._told_faults: set[str] = set()  # of the files
        self._router: Router | None = None
        self._written: list[EngineState] = []

    # ------------------------------------------------------------------------------------ start and end
    def start(self, router: Router | None, urls: list[str]) -> None:
        """Put the engines of the flag into the list, and wait until each has said what it is.

        Raises:
            ValueError: one of the flag's is of no use to the run.
            RuntimeError: one of the flag's does not answer.
        """
        self._router = router
        if router is None:
            return
        if urls:
            add_wanted(self._run_dir, urls)
        self._follow_list()
        for engine in [engine for engine in self._engines if engine.url in urls]:
            try:
                engine.found, engine.state = ray.get(engine.joined), "ready"
            except ray.exceptions.RayError as error:
                cause = root_cause(error)
                kind = ValueError if isinstance(cause, ValueError) else RuntimeError
                raise kind(f"--rollout-external-engine-addrs: {cause}") from error
        self.look()

    def release(self) -> None:
        """At the end of the run: let every engine go, with the weights of the last push. Idempotent."""
        try:
            calls = [engine.actor.release.remote() for engine in self._engines]
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayError, RuntimeError) as error:  # the run's own engines have to be ended after this
            logger.warning("engines of others were not let go: %s", error)
        for engine in self._engines:
            self._note(engine, "gone", "the run has ended")
        self._engines.clear()
        self._router = None
        self._write()

    # ------------------------------------------------------------------------------------ once a second
    @property
    def urls(self) -> list[str]:
        """Addresses of those that get requests."""
        return [engine.url for engine in self._engines if engine.state == "serving"]

    def look(self) -> None:
        """Follow the list, and look how the engines are. Takes little time; no engine is waited for."""
        if self._router is None:
            return
        self._follow_list()
        for engine in list(self._engines):
            if engine.state == "joining":
                self._look_whether_it_fits(engine)
            elif engine.state == "leaving":
                self._look_whether_it_is_idle(engine)
            elif engine.state == "serving":
                self._look_whether_it_lives(engine)
        if not self._pushes:
            self.admit()
        self._write()

    def _follow_list(self) -> None:
        try:
            wanted, errors = read_wanted(self._run_dir)
        except OSError as fault:  # the list counts as unchanged
            _warn_once(self._told_faults, fault)
            return
        for text in set(errors) - self._told_errors:
            logger.warning("%s", text)
        self._told_errors = set(errors)
        self._refused &= set(wanted)
        known = {engine.url for engine in self._engines} | self._refused
        for url in (url for url in wanted if url not in known):
            actor = self._make(self._next, url)
            self._engines.append(ExternalEngine(self._next, url, actor, self._join(actor)))
            self._next += 1
        now = time.monotonic()
        for engine in list(self._engines):
            if engine.url in wanted:
                engine.missing_since = None
                if engine.state == "leaving":
                    engine.state, engine.asked = "ready", None  # it has changed its mind, and gets the next push
            elif engine.missing_since is None:
                engine.missing_since = now
            elif engine.state != "leaving" and now - engine.missing_since >= _MISSING_S:
                self._begin_to_leave(engine)

    def _look_whether_it_fits(self, engine: ExternalEngine) -> None:
        if not ray.wait([engine.joined], timeout=0)[0]:
            return
        try:
            engine.found, engine.state = ray.get(engine.joined), "ready"
            self._say(f"engine {engine.index} at {engine.url} joins with the next weight push")
        except ray.exceptions.RayError as error:
            self._refused.add(engine.url)
            self._drop(engine, "refused", str(root_cause(error)))

    def _look_whether_it_lives(self, engine: ExternalEngine) -> None:
        if engine.asked is None:
            if time.monotonic() - engine.asked_at > _PROBE_INTERVAL_S:
                engine.asked, engine.asked_at = engine.actor.fault.remote(), time.monotonic()
        elif (fault := _answer(engine.asked)) is not _PENDING:
            engine.asked = None
            if fault is not None:
                self._lose(engine, str(fault))

    def _look_whether_it_is_idle(self, engine: ExternalEngine) -> None:
        if engine.asked is None:
            engine.asked = engine.actor.num_running.remote()
        elif (count := _answer(engine.asked)) is not _PENDING:
            engine.asked = None
            if count == 0 or not isinstance(count, int):
                self._let_go(engine)

    # ------------------------------------------------------------------------------------ around a push
    def targets(self) -> list[EngineTarget]:
        """Engines that get the next push, those included that leave and still work."""
        return [engine.target() for engine in self._engines if engine.found is not None]

    @property
    def has_new(self) -> bool:
        """Whether the next push is the first of one of them."""
        return any(engine.state == "ready" for engine in self._engines)

    @property
    def pushed_urls(self) -> list[str]:
        """Addresses of `targets`."""
        return [engine.url for engine in self._engines if engine.found is not None]

    def admit(self) -> None:
        """Send requests to those that are ready: they have the current weights."""
        ready = [engine for engine in self._engines if engine.state == "ready"]
        for engine in ready:
            assert self._router is not None
            try:
                self._router.add_worker(engine.url, self._api_key)
            except RuntimeError as error:
                self._lose(engine, str(error))
                continue
            engine.state, engine.asked_at = "serving", time.monotonic()
            self._say(f"engine {engine.index} at {engine.url} serves")
        if ready:
            self._on_change()
        self._write()

    def drop_culprits(self, error: BaseException) -> bool:
        """After a push that failed: lose the engines that do not answer, else those that the error names,
        and those that have just joined: one that never joins is not always named.

        Returns whether there were any; then the push can be made again.
        """
        pushed = [engine for engine in self._engines if engine.found is not None]
        refs = {engine.actor.fault.remote(): engine for engine in pushed}
        done = set(ray.wait(list(refs), num_returns=len(refs), timeout=_ANSWER_TIMEOUT_S)[0]) if refs else set()
        lost = [(engine, "it does not answer") for ref, engine in refs.items() if ref not in done]
        lost += [(engine, str(fault)) for ref, engine in refs.items() if ref in done and (fault := _answer(ref))]
        if not lost:
            named = {int(number) for number in re.findall(r"\bengine (\d+)\b", str(error))}
            culprits = [one for one in pushed if one.state == "ready" or one.index in named or one.url in str(error)]
            lost = [(engine, f"a push failed: {error}") for engine in culprits]
        for engine, reason in lost:
            self._refused.add(engine.url)
            self._lose(engine, reason)
        return bool(lost)

    # ------------------------------------------------------------------------------------ out
    def _begin_to_leave(self, engine: ExternalEngine) -> None:
        if engine.state != "serving":
            self._let_go(engine)
            return
        if not _take_out(self._router, engine):
            return  # the next look tries again
        engine.state, engine.asked = "leaving", None
        self._say(f"engine {engine.index} at {engine.url} leaves when it has answered its requests")
        self._on_change()

    def _let_go(self, engine: ExternalEngine) -> None:
        ray.wait([engine.actor.release.remote()], timeout=_ANSWER_TIMEOUT_S)
        self._drop(engine, "gone", "")

    def _lose(self, engine: ExternalEngine, reason: str) -> None:
        self._refused.add(engine.url)  # until its line goes and comes again
        was_serving = engine.state == "serving"
        _take_out(self._router, engine)  # also one that the router did not see healthy in time: later it might
        self._drop(engine, "lost", reason)
        if was_serving:
            self._on_change()

    def _drop(self, engine: ExternalEngine, state: str, note: str) -> None:
        if note:
            logger.warning("engine %d at %s: %s", engine.index, engine.url, note)
        self._say(
            f"engine {engine.index} at {engine.url} is {state}" + (f": {note.splitlines()[0]:.200}" if note else "")
        )
        self._engines.remove(engine)
        ray.kill(engine.actor)
        self._note(engine, state, note)

    def _note(self, engine: ExternalEngine, state: str, note: str) -> None:
        self._past[engine.url] = EngineState(url=engine.url, state=state, note=note[:500])

    def _write(self) -> None:
        present = {one.url: EngineState(url=one.url, state=one.state, note="") for one in self._engines}
        states = [*(self._past | present).values()]
        if states != self._written:
            try:
                write_states(self._run_dir, states)
            except OSError as error:  # a full disk does not end the run; the next look tries again
                _warn_once(self._told_faults, error)
                return
            self._written = states


def _answer(ref: ray.ObjectRef) -> object:
    """The answer of an actor's call; `_PENDING` while there is none, the error's text where it failed."""
    if not ray.wait([ref], timeout=0)[0]:
        return _PENDING
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return str(root_cause(error))


def _take_out(router: Router | None, engine: ExternalEngine) -> bool:
    """Let the router send it nothing more. Returns whether it obeys; a router that is gone is found elsewhere."""
    try:
        if router is not None:
            router.remove_worker(engine.url)
    except RuntimeError as error:
        logger.warning("engine %d at %s: %s", engine.index, engine.url, error)
        return False
    return True


def _warn_once(told: set[str], error: OSError) -> None:
    if str(error) not in told:
        told.add(str(error))
        logger.warning("engines of others: %s", error)


class ExternalEngineWorker(AttachedEngine):
    """An actor that talks to one such engine."""

    def __init__(self, index: int, url: str, api_key: str | None, log: str, settings: ProcessSettings) -> None:
        settings.apply()
        log_to(log, f"external-engine-{index}")
        super().__init__(index, url, 1, api_key)


def make_external_engines(
    config: Config,
    plan: Plan,
    launcher: Launcher,
    engines: EnginePool,
    say: Callable[[str], None],
    on_change: Callable[[], None],
) -> ExternalEngines:
    """Return the guests of a run, none of which has been asked yet."""
    expected: list[EngineRequirements] = []  # read once there is a guest

    def make(index: int, url: str) -> ActorHandle:
        return launcher.make_local(ExternalEngineWorker, f"engine-actor-{index}", index, url)

    def join(actor: ActorHandle) -> ray.ObjectRef:
        if not expected:
            expected.append(engine_requirements(config, plan, launcher.is_alone))
        # Without trainers no push makes the weights equal: then they have to be.
        own_weights = [] if plan.layout is not None else [engines.engines[0].weight_checksums.remote()]
        return actor.join.remote(expected[0], *own_weights)

    return ExternalEngines(
        launcher.run_dir,
        plan.num_engines + len(plan.eval_bundles),
        make,
        join,
        api_key=launcher.api_key,
        pushes=plan.layout is not None,
        say=say,
        on_change=on_change,
    )


def engine_requirements(config: Config, plan: Plan, is_alone: bool) -> EngineRequirements:
    """Return what an engine has to be, to work beside the run's own; `is_alone`: all of the run is on one machine."""
    folder = str(config.model.hf_checkpoint)
    hf_config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    server_args = policy_server_args(config, plan, 0)
    needed = {name: value for name, value in server_args.items() if name in _NEEDED and value}
    # SGLang may write a quantised checkpoint's own method into its arguments.
    alike = {name: server_args.get(name) for name in _ALIKE if name != "quantization" or plan.quantization is None}
    classes = tuple(hf_config.get("architectures") or ())
    return EngineRequirements(
        folder,
        classes,
        plan.shape,
        TORCH_DTYPES[plan.rollout_dtype],
        needed,
        alike,
        wait_s=config.rollout.engine_start_timeout_s,
        by_ipc=plan.transport == "ipc" and plan.device == "cuda",
        only_here=plan.transport == "broadcast" and is_alone,
    )
