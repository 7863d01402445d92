"""`Launcher`: Ray, the devices, and the processes of one run, from start to end. Nothing of it outlives its `close`."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group

from fusionrl.base.environment import (
    FOLDER_VARIABLE,
    PEERS_VARIABLE,
    child_environment,
    hook_secrets,
    not_passed_on,
    without_secrets,
)
from fusionrl.cluster.actor_process import Settled
from fusionrl.cluster.engine_specs import EngineRole, engine_spec
from fusionrl.cluster.engine_worker import EngineWorker
from fusionrl.cluster.guard import Guard
from fusionrl.cluster.private_folder import make_private_folder
from fusionrl.cluster.ray_cluster import LOOPBACK, Bundle, actor_on, is_alone, place_devices, start_ray
from fusionrl.cluster.roster import Roster
from fusionrl.cluster.workers import TRAINER_WORKERS, BufferWorker
from fusionrl.config.config import Config
from fusionrl.engines.process import interface_of
from fusionrl.engines.router import Router
from fusionrl.observe.run_dir import umask_of
from fusionrl.plan.auxiliary import Role, auxiliary_config
from fusionrl.plan.plan import Plan

logger = logging.getLogger(__name__)


def check_open_router(asks_for_key: bool, is_alone: bool) -> None:
    """Refuse a router without a key (--router-api-key none) where it is not on loopback.

    Raises:
        ValueError: the run has several nodes.
    """
    if not asks_for_key and not is_alone:
        raise ValueError(
            "--router-api-key none: on several nodes the router listens on the network, where whoever reaches it"
            " would use the engines; leave the flag out"
        )


class Launcher:
    """Starts Ray, reserves devices, makes actors and the router, and ends all of them."""

    def __init__(self, config: Config, plan: Plan, run_dir: Path, attempt: int) -> None:
        self._config, self._plan = config, plan
        self.run_dir, self._attempt = run_dir.resolve(), attempt
        self.roster = Roster()
        self.bundles: list[Bundle] = []
        self.api_key = secrets.token_hex(24)  # of the engines; no dash: a key that begins with one reads as a flag
        self._asks_for_key = config.rollout.router_api_key == "auto"
        self._umask = umask_of(config.run.run_dir_mode)
        self._private: Path | None = None  # Ray's files and the stores of process groups, for this user alone
        self._hook_secrets: dict[str, str] = {}
        self._group: PlacementGroup | None = None
        self._guard: Guard | None = None

    # ------------------------------------------------------------------------------------ start
    def start(self, on_ray: Callable[[], None] = lambda: None) -> None:
        """Start or join Ray and reserve the devices. `on_ray` is called once Ray runs, which installs signal handlers.

        Raises:
            ValueError: no such cluster, too few devices, or a variable of --hook-env is not set.
        """
        plan, cluster = self._plan, self._config.cluster
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self._hook_secrets = hook_secrets(self._config.run.hook_env)
        self.roster.hide([self.api_key, *self._hook_secrets.values()])
        if withheld := not_passed_on(self._config.run.hook_env):
            logger.info("not passed on to the run's processes: %s (see --hook-env)", ", ".join(withheld))
        self._private = make_private_folder()
        self._guard = Guard(self._private, child_environment("guard"))
        with without_secrets("ray"):  # its processes, and the actors, inherit this one's environment
            start_ray(
                plan.device,
                plan.num_bundles,
                address=cluster.ray_address,
                dashboard=self._config.run.dashboard,
                folder=self._private / "ray",
                allow_open=cluster.allow_open_ray,
            )
        on_ray()
        self._is_alone = is_alone()
        check_open_router(self._asks_for_key, self._is_alone)
        if plan.num_bundles:
            self._group, self.bundles = place_devices(plan.device, plan.num_bundles, cluster.placement_timeout_s)

    def make_engine(self, role: EngineRole, index: int) -> ActorHandle:
        """The actor of an engine, not yet started; one that takes a dead engine's place has the same name."""
        plan = self._plan
        scorers = {scorer.role: scorer.bundles for scorer in plan.scorers}
        numbers = plan.all_engine_bundles[index] if role == "engine" else scorers[role][index]
        places = [self.bundles[number] for number in numbers]
        spec = engine_spec(
            self._config,
            plan,
            role,
            index,
            places,
            host=self._host(places[0]),
            api_key=self.api_key,
            log_dir=str(self.run_dir / "logs"),
        )
        env, log = self._env(places[0].node_address), self._log(f"{role}-actor-{index}")
        made = actor_on(EngineWorker, places[0], self._group, env=env, max_concurrency=8)
        actor = made.remote(spec, str(log), Settled(self._umask))
        self.roster.add(spec.name, actor, log)
        return actor

    def make_trainers(self) -> tuple[list[ActorHandle], list[ActorHandle]]:
        """The policy's trainers, and those of a critic or prm, not yet set up; none without a layout."""
        if self._plan.layout is None:
            return [], []
        config, auxiliary = self._config, self._plan.auxiliary
        trainers = self._make_group(config, self._plan.trainer_bundles)
        if auxiliary is None:
            return trainers, []
        return trainers, self._make_group(auxiliary_config(config, auxiliary.role), auxiliary.bundles, auxiliary.role)

    @staticmethod
    def setup_trainers(groups: Sequence[Sequence[ActorHandle]]) -> list[ray.ObjectRef]:
        """Begin to set up the trainers of each group, which meet at its rank 0: references of what each has built.

        It waits until the processes of the ranks 0 are there, which import torch: seconds.
        """
        refs = []
        for group in filter(None, groups):
            address, port = ray.get(group[0].node_address.remote())
            refs += [trainer.setup.remote(address, port) for trainer in group]
        return refs

    def _make_group(self, config: Config, bundles: Sequence[int], role: Role | None = None) -> list[ActorHandle]:
        made = []
        for rank, bundle in enumerate(self.bundles[number] for number in bundles):
            env = self._env(bundle.node_address)
            env["OMP_NUM_THREADS"] = str(self._plan.train_num_threads)
            # MKL promises the same bits from run to run in a stated mode alone; it costs nothing that can be measured.
            env.setdefault("MKL_CBWR", "AUTO")
            log = self._log(f"{role or 'trainer'}-{rank}")
            actor = actor_on(TRAINER_WORKERS[role], bundle, self._group, env=env, max_concurrency=1).remote(
                config,
                self._plan,
                rank,
                str(self.run_dir),
                bundle.device_id,
                self._host(bundle),
                str(log),
                Settled(self._umask, self._hook_secrets),
            )
            self.roster.add(f"{role or 'trainer'} rank {rank}", actor, log)
            made.append(actor)
        return made

    def make_buffer(self) -> ActorHandle:
        """The Buffer's actor, not yet set up."""
        log = self._log("buffer")
        actor = actor_on(BufferWorker, None, None, env=self._env()).remote(
            self._config,
            self._plan,
            str(self.run_dir),
            self._attempt,
            str(log),
            Settled(self._umask, self._hook_secrets),
        )
        self.roster.add("the Buffer", actor, log)
        return actor

    def make_router(self, name: str = "router") -> Router:
        """A router, not yet started; its log has its `name`. Ports that the user fixed are those of "router"."""
        host = LOOPBACK if self._is_alone else ray.util.get_node_ip_address()
        logs, router_args = str(self.run_dir / "logs"), dict(self._config.passthrough.router)
        if name != "router":
            router_args.pop("port", None)
            router_args.pop("prometheus_port", None)
        key = self.api_key if self._asks_for_key else None
        return Router(host, logs, api_key=key, router_args=router_args, name=name)

    # ------------------------------------------------------------------------------------ where and how
    def _host(self, bundle: Bundle) -> str:
        return LOOPBACK if self._is_alone else bundle.node_address

    def _log(self, role: str) -> Path:
        return self.run_dir / "logs" / f"{role}.a{self._attempt}.log"

    def _env(self, address: str | None = None) -> dict[str, str]:
        """Environment of every actor: imports from the folder the command ran in, one collective interface."""
        paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
        if self._is_alone and self._private is not None:
            env[FOLDER_VARIABLE] = str(self._private / "stores")
        else:
            env[PEERS_VARIABLE] = ",".join(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        interface = interface_of(LOOPBACK if self._is_alone else address or LOOPBACK)
        if interface:
            env["GLOO_SOCKET_IFNAME"] = interface
        if self._plan.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that the machine has, but the run does not use
        else:
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
            if interface and not self._is_alone:
                env["NCCL_SOCKET_IFNAME"] = interface
        return env

    # ------------------------------------------------------------------------------------ end
    def keep_ray_logs(self) -> None:
        """After a failure: Ray's own logs, which are removed with its other files, in the run's folder."""
        if self._private is None or not (found := list(self._private.glob("ray/session_2*/logs"))):
            return
        target = self.run_dir / "logs" / f"ray.a{self._attempt}"
        try:
            shutil.copytree(found[0], target, ignore=shutil.ignore_patterns("export_events", "old"))
        except (shutil.Error, OSError) as error:  # files that are still written; must not hide the failure
            logger.debug("Ray's logs could not all be kept: %s", error)

    def close(self) -> None:
        """End every process of the run. Idempotent; never raises what would hide the error that led here."""
        try:
            if ray.is_initialized():
                for member in self.roster:
                    ray.kill(member.handle)
                if self._group is not None:
                    remove_placement_group(self._group)
                ray.shutdown()
        finally:
            self.roster.clear()
            self._group = None
            if self._guard is not None:
                self._guard.close()  # it removes the private folder
                self._guard, self._private = None, None
