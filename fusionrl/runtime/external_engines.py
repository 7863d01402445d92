"""`ExternalEngines`: engines that are started and ended outside the run, and serve it meanwhile.

--rollout-external-engine-addrs and `engines.txt` in the run's folder, which may change at any time, name them
(`fusionrl.observe.run_dir`). The states of one:

joining   its address is new; its facts are being checked
ready     it fits and waits for the next weight push; it gets no request before
serving   in the router, with the current weights
leaving   out of the router; it finishes its requests and still gets pushes
gone      released, in a state that others can use

When one dies, the others get its requests. A new one that breaks its first push is dropped and the push repeated.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle

from fusionrl.checks.images import image_settings
from fusionrl.config.config import Config
from fusionrl.engines.external_engine import AttachedEngine, EngineRequirements, ExternalEngineFacts, host_of
from fusionrl.engines.images import CACHE_VARIABLE
from fusionrl.engines.router import Router
from fusionrl.models.engine_config import engine_fields
from fusionrl.models.shape import read_hf_config, read_text_config
from fusionrl.observe.run_dir import EngineState, add_wanted, read_wanted, write_states
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.runtime.actor_process import ProcessSettings, log_to
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.engine_specs import TORCH_DTYPES, policy_server_args
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.supervisor import root_cause

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
_PROBE_INTERVAL_S = 5.0
_MISSING_S = 0.5  # a list that is being written in place reads as empty or partial for a moment
_PENDING = object()
_NEEDED = ("disable_radix_cache", "enable_return_routed_experts", "incremental_streaming_output")
"""ServerArgs fields without which the run would get wrong answers; it sets them on its own engines."""
_ALIKE = ("quantization", "context_length", "allow_auto_truncate", "mm_enable_dp_encoder")
"""Of `fusionrl.config.engine_groups.ALIKE`, those that also apply to external engines."""


@dataclass
class ExternalEngine:
    """An engine that another program started, and what the run knows of it."""

    index: int
    url: str
    actor: ActorHandle
    joined: ray.ObjectRef
    state: str = "joining"
    facts: ExternalEngineFacts | None = None
    pending_call: ray.ObjectRef | None = None  # whether it lives, or how many requests it has
    probed_at: float = field(default=0.0)
    missing_since: float | None = None  # when the list was first read without it

    def target(self) -> EngineTarget:
        """The engine as a weight push addresses it; its devices have no number here."""
        assert self.facts is not None
        ranks = (-1,) * self.facts.tp_size
        host = host_of(self.url)
        return EngineTarget(self.index, self.actor, f"external {host}", ranks, 0, self.facts.ep_size, host)


class ExternalEngines:
    """Follows the list of wanted engines; called from the driver's thread alone."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        launcher: Launcher,
        own_engines: EnginePool,
        say: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`say` shows what happens to the engines; `on_change` is called when other engines are serving than before."""
        self._config, self._plan, self._launcher, self._own_engines = config, plan, launcher, own_engines
        self._run_dir, self._say, self._on_change = launcher.run_dir, say, on_change
        self._next = plan.num_engines + len(plan.eval_bundles)
        self._requirements: EngineRequirements | None = None  # read once there is an engine
        self._engines: list[ExternalEngine] = []
        self._past: dict[str, EngineState] = {}  # address → how a former engine ended
        self._refused: set[str] = set()  # still in the list
        self._reported_errors: set[str] = set()
        self._reported_faults: set[str] = set()  # of the files
        self._router: Router | None = None
        self._written: list[EngineState] = []

    # ------------------------------------------------------------------------------------ start and end
    def start(self, router: Router | None, urls: list[str]) -> None:
        """Add the engines of the flag to the list, and wait until each has joined. Raises ValueError if the run cannot
        use one of them; RuntimeError if one does not answer."""
        self._router = router
        if router is None:
            return
        if urls:
            add_wanted(self._run_dir, urls)
        self._follow_list()
        for engine in [engine for engine in self._engines if engine.url in urls]:
            try:
                engine.facts, engine.state = ray.get(engine.joined), "ready"
            except ray.exceptions.RayError as error:
                cause = root_cause(error)
                kind = ValueError if isinstance(cause, ValueError) else RuntimeError
                raise kind(f"--rollout-external-engine-addrs: {cause}") from error
        self.look()

    def release(self) -> None:
        """At the end of the run: release every engine, with the weights of the last push. Idempotent."""
        try:
            calls = [engine.actor.release.remote() for engine in self._engines]
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayError, RuntimeError) as error:  # the run's own engines have to be ended after this
            logger.warning("engines of others were not let go: %s", error)
        for engine in self._engines:
            self._past[engine.url] = EngineState(url=engine.url, state="gone", note="the run has ended")
        self._engines.clear()
        self._router = None
        self._write()

    # ------------------------------------------------------------------------------------ once a second
    @property
    def urls(self) -> list[str]:
        """Addresses of those that get requests."""
        return [engine.url for engine in self._engines if engine.state == "serving"]

    def look(self) -> None:
        """Follow the list and check every engine. Never waits for an engine."""
        if self._router is None:
            return
        self._follow_list()
        checks = {"joining": self._check_joining, "leaving": self._check_leaving, "serving": self._check_serving}
        for engine in [engine for engine in self._engines if engine.state in checks]:
            checks[engine.state](engine)
        if self._plan.layout is None:  # no push will come
            self.admit()
        self._write()

    def _follow_list(self) -> None:
        try:
            wanted_urls, errors = read_wanted(self._run_dir)
        except OSError as error:  # the list counts as unchanged
            _warn_once(self._reported_faults, error)
            return
        for text in set(errors) - self._reported_errors:
            logger.warning("%s", text)
        self._reported_errors = set(errors)
        self._refused &= set(wanted_urls)
        known = {engine.url for engine in self._engines} | self._refused
        for url in (url for url in wanted_urls if url not in known):
            self._add(url)
        now = time.monotonic()
        for engine in list(self._engines):
            if engine.url in wanted_urls:
                engine.missing_since = None
                if engine.state == "leaving":
                    engine.state, engine.pending_call = "ready", None  # it has changed its mind, and gets the next push
            elif engine.missing_since is None:
                engine.missing_since = now
            elif engine.state != "leaving" and now - engine.missing_since >= _MISSING_S:
                self._begin_to_leave(engine)

    def _add(self, url: str) -> None:
        """Make the actor of an engine, and begin to ask the engine what it is."""
        if self._plan.lora_push == "adapter":
            note = "it does not know versions of adapters, which this run pushes (--lora-push merged)"
            logger.warning("the engine at %s: %s", url, note)
            self._say(f"the engine at {url} is refused: {note}")
            self._refused.add(url)
            self._past[url] = EngineState(url=url, state="refused", note=note)
            return
        if self._requirements is None:
            self._requirements = engine_requirements(self._config, self._plan, self._launcher.is_alone)
        actor = self._launcher.make_local(ExternalEngineWorker, f"engine-actor-{self._next}", self._next, url)
        # Without trainers no push makes the weights equal: then they have to be.
        has_push = self._plan.layout is not None
        own_weights = [] if has_push else [self._own_engines.present[0].weight_checksums.remote()]
        joined = actor.join.remote(self._requirements, *own_weights)
        if self._requirements.images is not None and self._requirements.images.trains_tower:
            logger.warning(
                "engine %d at %s: it must have been started with %s=0 in its environment, which it does not show; else"
                " it answers with features of images from before a weight push",
                *(self._next, url, CACHE_VARIABLE),
            )
        self._engines.append(ExternalEngine(self._next, url, actor, joined))
        self._next += 1

    def _check_joining(self, engine: ExternalEngine) -> None:
        if not ray.wait([engine.joined], timeout=0)[0]:
            return
        try:
            engine.facts, engine.state = ray.get(engine.joined), "ready"
            self._say(f"engine {engine.index} at {engine.url} joins with the next weight push")
        except ray.exceptions.RayError as error:
            self._refused.add(engine.url)
            self._drop(engine, "refused", str(root_cause(error)))

    def _check_serving(self, engine: ExternalEngine) -> None:
        if engine.pending_call is None:
            if time.monotonic() - engine.probed_at > _PROBE_INTERVAL_S:
                engine.pending_call, engine.probed_at = engine.actor.fault.remote(), time.monotonic()
        elif (fault := _answer(engine.pending_call)) is not _PENDING:
            engine.pending_call = None
            if fault is not None:
                self._lose(engine, str(fault))

    def _check_leaving(self, engine: ExternalEngine) -> None:
        if engine.pending_call is None:
            engine.pending_call = engine.actor.num_running.remote()
        elif (count := _answer(engine.pending_call)) is not _PENDING:
            engine.pending_call = None
            if count == 0 or not isinstance(count, int):
                self._let_go(engine)

    # ------------------------------------------------------------------------------------ around a push
    def targets(self) -> list[EngineTarget]:
        """Return the engines that get the next push, including those that leave and still work."""
        return [engine.target() for engine in self._engines if engine.facts is not None]

    @property
    def pushed_urls(self) -> list[str]:
        return [engine.url for engine in self._engines if engine.facts is not None]

    def admit(self) -> None:
        """Send requests to the ready engines, which now have the current weights."""
        ready = [engine for engine in self._engines if engine.state == "ready"]
        for engine in ready:
            assert self._router is not None
            try:
                self._router.add_worker(engine.url, self._launcher.api_key)
            except RuntimeError as error:
                self._lose(engine, str(error))
                continue
            engine.state, engine.probed_at = "serving", time.monotonic()
            self._say(f"engine {engine.index} at {engine.url} serves")
        if ready:
            self._on_change()
        self._write()

    def drop_culprits(self, error: BaseException) -> bool:
        """After a push that failed: lose the engines that do not answer, else those that the error names,
        and those that have just joined: one that never joins is not always named.

        Returns whether there were any; then the push can be made again.
        """
        pushed = [engine for engine in self._engines if engine.facts is not None]
        refs = {engine.actor.fault.remote(): engine for engine in pushed}
        done = set(ray.wait(list(refs), num_returns=len(refs), timeout=_ANSWER_TIMEOUT_S)[0]) if refs else set()
        lost = [(engine, "it does not answer") for ref, engine in refs.items() if ref not in done]
        lost += [(engine, str(fault)) for ref, engine in refs.items() if ref in done and (fault := _answer(ref))]
        if not lost:
            named = {int(number) for number in re.findall(r"\bengine (\d+)\b", str(error))}
            culprits = [e for e in pushed if e.state == "ready" or e.index in named or e.url in str(error)]
            lost = [(engine, f"a push failed: {error}") for engine in culprits]
        for engine, reason in lost:
            self._lose(engine, reason)
        return bool(lost)

    # ------------------------------------------------------------------------------------ out
    def _begin_to_leave(self, engine: ExternalEngine) -> None:
        if engine.state != "serving":
            self._let_go(engine)
            return
        if not _take_out(self._router, engine):
            return  # the next look tries again
        engine.state, engine.pending_call = "leaving", None
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
        self._past[engine.url] = EngineState(url=engine.url, state=state, note=note[:500])

    def _write(self) -> None:
        present = {e.url: EngineState(url=e.url, state=e.state, note="") for e in self._engines}
        states = [*(self._past | present).values()]
        if states != self._written:
            try:
                write_states(self._run_dir, states)
            except OSError as error:  # a full disk does not end the run; the next look tries again
                _warn_once(self._reported_faults, error)
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
    """Take an engine out of the router. Returns whether that worked; the supervision reports a dead router."""
    try:
        if router is not None:
            router.remove_worker(engine.url)
    except RuntimeError as error:
        logger.warning("engine %d at %s: %s", engine.index, engine.url, error)
        return False
    return True


def _warn_once(reported: set[str], error: OSError) -> None:
    if str(error) not in reported:
        reported.add(str(error))
        logger.warning("engines of others: %s", error)


class ExternalEngineWorker(AttachedEngine):
    """The actor process that controls one external engine."""

    def __init__(self, index: int, url: str, api_key: str | None, log: str, settings: ProcessSettings) -> None:
        settings.apply()
        log_to(log, f"external-engine-{index}")
        super().__init__(index, url, 1, api_key)


def engine_requirements(config: Config, plan: Plan, is_alone: bool) -> EngineRequirements:
    """Return what an external engine must match; `is_alone`: the whole run is on one machine."""
    folder = str(config.model.hf_checkpoint)
    served = read_hf_config(folder, "--hf-checkpoint")  # of a model that sees: engines serve all of it
    if plan.shape.vision is None:
        served = {**read_text_config(folder, "--hf-checkpoint"), **engine_fields(folder)}
    server_args = policy_server_args(config, plan, 0)
    # With another runner of experts an engine may record none of them.
    names = (*_NEEDED, "moe_runner_backend") if server_args.get("enable_return_routed_experts") else _NEEDED
    needed = {name: value for name, value in server_args.items() if name in names and value}
    if (images := image_settings(config, plan.shape)) is not None:
        needed |= {name: value for name, value in images.arguments(plan.device).items() if name == "mm_process_config"}
    # SGLang may write a quantised checkpoint's own method into its arguments.
    alike = {name: server_args.get(name) for name in _ALIKE if name != "quantization" or plan.quantization is None}
    classes = tuple(served.get("architectures") or ())
    return EngineRequirements(
        folder,
        classes,
        plan.shape,
        TORCH_DTYPES[plan.rollout_dtype],
        needed,
        alike,
        json.loads(str(server_args.get("json_model_override_args") or "{}")),
        images,
        wait_s=config.rollout.engine_start_timeout_s,
        by_ipc=plan.transport == "ipc" and plan.device == "cuda",
        only_here=plan.transport == "broadcast" and is_alone,
    )
