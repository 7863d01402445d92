"""`Launcher`: Ray, the devices, and the processes of one run, from start to end. Nothing of it outlives its `close`.

`LocalLauncher` (--in-process) has the actors in this process; engines' servers and the router are children.
"""

import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from fusionrl.base.environment import (
    ENGINE_KEY,
    FOLDER_VARIABLE,
    MKL_MODE,
    PEERS_VARIABLE,
    deterministic_settings,
    extended_environment,
    hook_secrets,
    not_passed_on,
    without_secrets,
)
from fusionrl.base.imports import without_collections
from fusionrl.base.process import raise_open_files
from fusionrl.base.sockets import LOOPBACK, collective_interfaces
from fusionrl.buffer.actor import BufferActor
from fusionrl.config.config import Config
from fusionrl.config.run import PROFILES, ProfileOrder, nsys_options
from fusionrl.engines.engine import EngineActor
from fusionrl.engines.router import Router
from fusionrl.engines.spec import EngineSpec
from fusionrl.observe.run_dir import umask_of
from fusionrl.plan.devices import VARIABLE, Gpu, nth, refuse_slices, shared_settings
from fusionrl.plan.plan import Plan
from fusionrl.plan.trainer_plan import Role, auxiliary_config
from fusionrl.runtime.actor_process import EngineWorker, ProcessSettings
from fusionrl.runtime.early_start import EarlyStart
from fusionrl.runtime.engine_specs import EngineRole, engine_specs
from fusionrl.runtime.ray_cluster import (
    LEAVE_DEVICES,
    Bundle,
    actor_on,
    devices_gone,
    has_raylet,
    is_alone,
    place_devices,
    places_now,
    start_ray,
)
from fusionrl.runtime.restarts import Restarts
from fusionrl.runtime.supervisor import ActorRegistry
from fusionrl.runtime.worker_actors import TRAINER_WORKERS, BufferWorker
from fusionrl.weights.remote_calls import LocalActor, end, put

logger = logging.getLogger(__name__)

REPLACED_S = 5.0  # for Ray to have given other devices in place of those of a node that died


class Launcher:
    """Starts Ray, reserves devices, makes actors and the router, and ends all of them."""

    def __init__(
        self, config: Config, plan: Plan, run_dir: Path, attempt: int, early_start: EarlyStart | None = None
    ) -> None:
        """`early_start`: the folder, guard and nursery that were started already; they end with the run."""
        self._config, self._plan, self._early_start = config, plan, early_start or EarlyStart()
        self.run_dir, self._attempt = run_dir.resolve(), attempt
        self.registry = ActorRegistry()
        self.restarts = Restarts(config.run.max_restarts, has_raylet)
        self.bundles: list[Bundle] = []
        # Of the engines. No dash: a key that begins with one reads as a flag. Engines of others have one already.
        self.api_key = os.environ.get(ENGINE_KEY) or secrets.token_hex(24)
        self._asks_for_key = config.rollout.router_api_key == "auto"
        self._umask = umask_of(config.run.run_dir_mode)
        self._hook_secrets: dict[str, str] = {}
        self._group: PlacementGroup | None = None
        self._parts: dict[str, list[ActorHandle]] = {}  # name of an engine over several nodes → its other parts
        self.is_alone = config.cluster.ray_address is None
        """The run has a cluster of its own: one node, which listens on loopback."""
        self._inherits = self.is_alone and plan.device == "cpu"

    @property
    def is_running(self) -> bool:
        """Return whether actors can be asked."""
        return bool(ray.is_initialized())

    # ------------------------------------------------------------------------------------ start
    def start(self, on_ray: Callable[[], None] = lambda: None) -> None:
        """Start or join Ray and reserve the devices. `on_ray` is called once Ray runs, which installs signal handlers.
        Raises ValueError if no cluster answers, it has too few devices, or a variable of --hook-env is not set."""
        plan, cluster = self._plan, self._config.cluster
        raise_open_files()  # for the router, and for whatever else is started here
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self._hook_secrets = hook_secrets(self._config.run.hook_env)
        self.registry.begin([self.api_key, *self._hook_secrets.values()])
        if withheld := not_passed_on(self._config.run.hook_env):
            logger.info("not passed on to the run's processes: %s (see --hook-env)", ", ".join(withheld))
        self._early_start.begin(self._config, plan.device)
        private = self._early_start.folder
        assert private is not None
        # Ray's processes inherit this one's environment; on a CPU so do the actors, in a cluster of the run's own.
        added = (
            LEAVE_DEVICES | self._early_start.environment() | (self._env(is_ours=True) or {}) if self._inherits else {}
        )
        with without_secrets("ray"), extended_environment(added):
            start_ray(
                plan.device,
                plan.num_bundles,
                address=cluster.ray_address,
                dashboard=self._config.run.dashboard,
                folder=private / "ray",
                allow_open=cluster.allow_open_ray,
            )
        on_ray()
        self.is_alone = self.is_alone or is_alone()
        if not self._asks_for_key and not self.is_alone:
            raise ValueError(
                "--router-api-key none: on several nodes the router listens on the network, where every client"
                " could use the engines; leave the flag out"
            )
        if plan.num_bundles:
            had_them = cluster.ray_address is not None and self._config.run.resume
            self._group, self.bundles = place_devices(
                plan.device, plan.num_bundles, cluster.placement_timeout_s, may_come_back=had_them
            )
            num_trainers = plan.layout.world_size if plan.layout else 0
            largest = max((len(bundles) for bundles in plan.all_engine_bundles), default=0)
            refuse_slices([bundle.gpu for bundle in self.bundles], num_trainers, largest, plan.transport)

    def find_places(self, known: Collection[int]) -> set[int]:
        """Find out where the devices are now, after a node may have died; return the numbers of those that are gone.

        Ray has a moment to give others in place of those that were not `known` to be gone."""
        assert self._group is not None, "the run has devices"
        deadline = time.monotonic() + REPLACED_S
        while True:
            self.bundles = places_now(self._plan.device, self._group, self.bundles)
            gone = devices_gone(self.bundles)
            if gone <= set(known) or time.monotonic() > deadline:
                return gone
            time.sleep(0.5)

    def make_engine(self, role: EngineRole, index: int) -> ActorHandle:
        """The actor of an engine, not yet started; one that takes a dead engine's place has the same name.

        An engine over several nodes has an actor on each; this is the one that serves (`runtime/multi_node_engine.py`).
        """
        self.has_lost_engine(role, index)  # finds the devices that Ray gave in place of a dead node's
        places, specs = self._engine_specs(role, index)
        if len(specs) == 1:
            return self._engine_actor(EngineWorker, specs[0], places[0])
        from fusionrl.runtime.multi_node_engine import EnginePartWorker, MultiNodeEngineWorker

        per_node = specs[0].ranks_here
        parts = [self._engine_actor(EnginePartWorker, s, places[i * per_node]) for i, s in enumerate(specs) if i]
        self._parts[specs[0].name] = parts
        return self._engine_actor(MultiNodeEngineWorker, specs[0], places[0], parts)

    def end_engine(self, actor: ActorHandle) -> None:
        """End the actors of an engine that is dead."""
        name = next((member.name for member in self.registry if member.handle == actor), "")
        actors = [actor, *self._parts.pop(name, [])]
        for each in actors:
            ray.kill(each)
        self.registry.forget(actors)

    def has_lost_engine(self, role: EngineRole, index: int) -> bool:
        """Find out where the engine's devices are now; return whether the node of one is dead, and Ray has given no
        other device so far."""
        numbers = set(self._plan.bundles_of(role, index))
        if self._group is None or numbers.isdisjoint(devices_gone(self.bundles)):
            return False
        self.bundles = places_now(self._plan.device, self._group, self.bundles)
        return not numbers.isdisjoint(devices_gone(self.bundles))

    def _engine_specs(self, role: EngineRole, index: int) -> tuple[list[Bundle], list[EngineSpec]]:
        """(devices of an engine, the specification of each of its parts)."""
        places = [self.bundles[number] for number in self._plan.bundles_of(role, index)]
        return places, engine_specs(
            *(self._config, self._plan, role, index, places),
            host_of=self._host,
            api_key=self.api_key,
            log_dir=str(self.run_dir / "logs"),
        )

    def _engine_actor(self, cls: type, spec: EngineSpec, place: Bundle, *more: object) -> ActorHandle:
        log = self._log(f"{spec.role}-actor-{spec.index}" + (f"-part-{spec.node_rank}" if spec.node_rank else ""))
        settings = ProcessSettings(self._umask, host=spec.host, numa_affinity=self._config.cluster.numa_affinity)
        actor_class = actor_on(cls, place, self._group, env=self._env(), max_concurrency=8)
        actor = actor_class.remote(spec, str(log), settings, *more)
        self.registry.add(spec.name, actor, log)
        return actor

    def make_local(self, cls: type, log_name: str, *arguments: object) -> ActorHandle:
        """An actor on this node, whose class takes `arguments`, the engines' key, its log and its settings.

        It is not in the registry: the run survives its end.
        """
        log = self._log(log_name)
        host = LOOPBACK if self.is_alone else ray.util.get_node_ip_address()
        actor_class = actor_on(cls, None, None, env=self._env(), max_concurrency=8)
        return actor_class.remote(*arguments, self.api_key, str(log), ProcessSettings(self._umask, host=host))

    def make_trainers(self, plan: Plan) -> tuple[list[ActorHandle], list[ActorHandle]]:
        """The policy's trainers, and those of a critic or prm, not yet set up; none without a layout.

        `plan`: the run's, or that of the devices that are left.
        """
        if plan.layout is None:
            return [], []
        config, auxiliary = self._config, plan.auxiliary
        trainers = self._make_group(config, plan, plan.trainer_bundles)
        if auxiliary is None:
            return trainers, []
        return trainers, self._make_group(
            auxiliary_config(config, auxiliary.role), plan, auxiliary.bundles, auxiliary.role
        )

    def _make_group(
        self, config: Config, plan: Plan, bundles: Sequence[int], role: Role | None = None
    ) -> list[ActorHandle]:
        actors, threads = [], {"OMP_NUM_THREADS": str(self._plan.train_num_threads)}
        variable, mode = MKL_MODE
        threads[variable] = os.environ.get(variable, mode)
        threads |= deterministic_settings(self._plan.device) if self._config.run.bitwise else {}
        for rank, bundle in enumerate(self.bundles[number] for number in bundles):
            env = self._env()
            log = self._log(f"{role or 'trainer'}-{rank}")
            nsys = _nsys(self._config, self.run_dir, rank, self._attempt) if role is None else None
            actor_class = actor_on(TRAINER_WORKERS[role], bundle, self._group, env=env, nsys=nsys, max_concurrency=1)
            actor = actor_class.remote(
                config,
                plan,
                rank,
                str(self.run_dir),
                bundle.gpu.ordinal,
                self._host(bundle),
                str(log),
                ProcessSettings(
                    self._umask, self._hook_secrets, self._host(bundle), threads, config.cluster.numa_affinity
                ),
            )
            self.registry.add(f"{role or 'trainer'} rank {rank}", actor, log)
            actors.append(actor)
        return actors

    def make_buffer(self) -> ActorHandle:
        """The Buffer's actor, not yet set up."""
        log = self._log("buffer")
        actor = actor_on(BufferWorker, None, None, env=self._env()).remote(
            self._config,
            self._plan,
            str(self.run_dir),
            self._attempt,
            str(log),
            ProcessSettings(self._umask, self._hook_secrets),
        )
        self.registry.add("the Buffer", actor, log)
        return actor

    def make_router(self, name: str = "router") -> Router:
        """A router, not yet started; its log has its `name`. Ports that the user fixed are those of "router"."""
        host = LOOPBACK if self.is_alone else ray.util.get_node_ip_address()
        logs, router_args = str(self.run_dir / "logs"), dict(self._config.passthrough.router)
        if name != "router":
            router_args.pop("port", None)
            router_args.pop("prometheus_port", None)
        elif self._plan.has_pairs:
            router_args["pd_disaggregation"] = True
        key = self.api_key if self._asks_for_key else None
        on_death = partial(self.restarts.begin, "router")
        return Router(host, logs, api_key=key, router_args=router_args, name=name, on_death=on_death)

    # ------------------------------------------------------------------------------------ where and how
    def _host(self, bundle: Bundle) -> str:
        return LOOPBACK if self.is_alone else bundle.node_address

    def _log(self, role: str) -> Path:
        return self.run_dir / "logs" / f"{role}.a{self._attempt}.log"

    def _env(self, *, is_ours: bool = False) -> dict[str, str] | None:
        """Return the environment to pass to an actor, or to add to ours; None: it inherits ours."""
        if self._inherits and not is_ours:
            return None
        private = self._early_start.folder
        return actor_environment(
            self._plan,
            self._config.passthrough.sglang,
            os.environ,
            stores=private / "stores" if self.is_alone and private is not None else None,
            peers=[] if self.is_alone else [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]],
        )

    # ------------------------------------------------------------------------------------ end
    def keep_ray_logs(self) -> None:
        """After a failure: copy Ray's logs into the run's folder, as its own files are removed."""
        private = self._early_start.folder
        if private is None or not (log_folders := list(private.glob("ray/session_2*/logs"))):
            return
        target = self.run_dir / "logs" / f"ray.a{self._attempt}"
        try:
            shutil.copytree(log_folders[0], target, ignore=shutil.ignore_patterns("export_events", "old"))
        except (shutil.Error, OSError) as error:  # files that are still written; must not hide the failure
            logger.debug("Ray's logs could not all be kept: %s", error)

    def close(self) -> None:
        """End every process of the run. Idempotent; never raises an error that would hide an earlier one."""
        try:
            # Collecting an ObjectRef after the shutdown makes Ray abort the process.
            with without_collections():
                self._end_ray()
        finally:
            self.registry.clear()
            self._group = None
            self._early_start.close()

    def _end_ray(self) -> None:
        if ray.is_initialized():
            for member in self.registry:
                ray.kill(member.handle)
            if self._group is not None:
                remove_placement_group(self._group)
            ray.shutdown()


def _nsys(config: Config, run_dir: Path, rank: int, attempt: int) -> dict[str, str] | None:
    order = ProfileOrder.of(config)
    if order is None or order.tool != "nsys" or not order.wants_trainer(rank):
        return None
    return nsys_options(str(run_dir.absolute() / PROFILES / f"trainer-{rank}.a{attempt}.%n"))


def actor_environment(
    plan: Plan,
    server_args: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    stores: Path | None,
    peers: Sequence[str],
) -> dict[str, str]:
    """Return the environment that every actor needs on any node: import paths and NCCL settings.

    An engine's server inherits its actor's, so trainers and engines have the same settings. `stores`: the folder of the
    run's stores where it is alone on its node, else `peers` are the addresses of the nodes.
    """
    paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    if stores is not None:
        env[FOLDER_VARIABLE] = str(stores)
    else:
        env[PEERS_VARIABLE] = ",".join(peers)
    if plan.device == "cpu":
        return env | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU that the machine has, but the run does not use
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env | (shared_settings(server_args, environ) if plan.transport == "broadcast" else {})


_ENGINE_THREADS = 8  # as the Ray actor of an engine answers so many calls at once


class LocalLauncher(Launcher):
    """Makes local actors instead of Ray actors. They write to the driver's log."""

    _is_running = False

    @property
    def is_running(self) -> bool:
        return self._is_running

    def start(self, on_ray: Callable[[], None] = lambda: None) -> None:
        """Take over the environment that actors have under Ray; there is nothing else to start."""
        plan = self._plan
        raise_open_files()
        self._early_start.begin(self._config, plan.device)
        self._inherits = False  # `_env` is for this process
        self._is_running = True
        os.environ.update(self._env() or {})
        os.environ.update(collective_interfaces(LOOPBACK, os.environ))
        os.environ["OMP_NUM_THREADS"] = str(plan.train_num_threads)
        os.environ.setdefault(*MKL_MODE)
        if self._config.run.bitwise:
            os.environ.update(deterministic_settings(plan.device))
        if plan.layout is not None:
            # Here, for where the threads of trainer and Buffer import it at once, one may find sympy half imported.
            import_module("torch.fx.experimental.symbolic_shapes")
        visible = os.environ.get(VARIABLE)
        for number in range(plan.num_bundles):
            gpu = Gpu(number, number) if plan.device == "cpu" else nth(visible, number)
            self.bundles.append(Bundle(number, number, socket.gethostname(), LOOPBACK, gpu))

    def make_engine(self, role: EngineRole, index: int) -> ActorHandle:
        _, (spec,) = self._engine_specs(role, index)
        return self._add(spec.name, LocalActor(lambda: EngineActor(spec), spec.name, _ENGINE_THREADS))

    def _make_group(
        self, config: Config, plan: Plan, bundles: Sequence[int], role: Role | None = None
    ) -> list[ActorHandle]:
        (number,) = bundles  # the checks refuse more than one rank
        bundle, worker = self.bundles[number], TRAINER_WORKERS[role]
        arguments = (config, plan, 0, str(self.run_dir), bundle.gpu.ordinal, LOOPBACK, None)
        return [self._add("trainer rank 0", LocalActor(lambda: worker(*arguments), "trainer"))]

    def make_buffer(self) -> ActorHandle:
        arguments = (self._config, self._plan, str(self.run_dir), self._attempt, put)
        return self._add("the Buffer", LocalActor(lambda: BufferActor(*arguments), "buffer"))

    def _add(self, name: str, actor: LocalActor) -> ActorHandle:
        self.registry.add(name, actor, Path(self._log("driver")))
        return actor

    def _end_ray(self) -> None:
        self._is_running = False
        for member in self.registry:
            if isinstance(member.handle, LocalActor):
                end(member.handle)
