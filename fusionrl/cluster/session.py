"""`Session`: the actors of one run, from start to end. Nothing of it outlives its `close`."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from fusionrl.base.environment import (
    FOLDER_VARIABLE,
    PEERS_VARIABLE,
    child_environment,
    hook_secrets,
    not_passed_on,
    without_secrets,
)
from fusionrl.buffer.actor import EngineEndpoints
from fusionrl.cluster.guard import Guard
from fusionrl.cluster.ray_cluster import (
    LOOPBACK,
    Bundle,
    actor_on,
    gather,
    is_alone,
    place_devices,
    root_cause,
    start_ray,
)
from fusionrl.cluster.recovery import Recovery
from fusionrl.cluster.trainers import TrainerGroups
from fusionrl.cluster.workers import BufferWorker, EngineWorker, Settled, TrainerWorker
from fusionrl.config.config import Config
from fusionrl.engines.engine import EngineSpec
from fusionrl.engines.process import interface_of
from fusionrl.engines.router import Router
from fusionrl.observe.run_dir import umask_of
from fusionrl.plan.auxiliary import Role, auxiliary_config
from fusionrl.plan.plan import Plan, pinned
from fusionrl.plan.push import EngineTarget, Feed, plan_feeds
from fusionrl.sync.disk_push import drop_files, push_by_disk
from fusionrl.sync.push import push_weights
from fusionrl.sync.verify import WeightMismatch, verify_push

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_ENGINE_STOP_TIMEOUT_S = 20.0
_ADD_TIMEOUT_S = 5.0  # for the Buffer to write the last of what training found out about samples
_MAX_TMPDIR_BYTES = 24  # of the 107 of a socket's path
_MAX_PUSHES = 3  # with --use-fault-tolerance: of one version, where engines die meanwhile


class Session:
    """Engines, router, Buffer and trainers of a run. A context manager: leaving it ends every process of the run."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: Path,
        attempt: int,
        *,
        say: Callable[[str], None] = lambda text: None,
        check_stop: Callable[[], None] = lambda: None,
        on_ray: Callable[[], None] = lambda: None,
    ) -> None:
        """`say` is told what is going on; `check_stop` is called while waiting, and may raise to end the wait;
        `on_ray` is called once Ray runs, which installs signal handlers of its own."""
        self.config, self.plan = config, plan
        self.run_dir, self.attempt = run_dir.resolve(), attempt
        self.say, self.check_stop, self.on_ray = say, check_stop, on_ray
        self.trainers = TrainerGroups(config, plan)
        self._engines_away = False  # whether the engines gave their memory back
        self.engines: list[Any] = []
        self.urls: list[str] = []
        self.scorers: dict[str, list[Any]] = {}  # role → engines that only read, and get no weights
        self.buffer: Any = None
        self.router: Router | None = None
        self.api_key: str | None = None
        self._private: Path | None = None  # Ray's files and the stores of process groups, for this user alone
        self._hook_secrets: dict[str, str] = {}
        self._group: PlacementGroup | None = None
        self._guard: Guard | None = None
        self._started_ray = False
        self.rng_restored = False  # whether `load` found the layout of these trainers
        self._num_pushes = 0
        self._adding: Any = None  # reference of the last `add_trained`
        self._version = 0  # of the last push
        self._recovery: Recovery | None = None  # --use-fault-tolerance
        self._bundles: list[Bundle] = []
        self._targets: list[EngineTarget] = []
        self._feeds: list[Feed] = []

    # ------------------------------------------------------------------------------------ life
    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, RuntimeError | OSError | ray.exceptions.RayError):
            self._keep_ray_logs()
        self.close()

    def _start(self) -> None:
        plan, cluster = self.plan, self.config.cluster
        self.say("starting Ray")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self._hook_secrets = hook_secrets(self.config.run.hook_env)
        if withheld := not_passed_on(self.config.run.hook_env):
            logger.info("not passed on to the run's processes: %s (see --hook-env)", ", ".join(withheld))
        self._private = _private_folder()
        self._guard = Guard(self._private, child_environment("guard"))
        with without_secrets("ray"):  # its processes, and the actors, inherit this one's environment
            self._started_ray = start_ray(
                plan.device,
                plan.num_bundles,
                address=cluster.ray_address,
                dashboard=self.config.run.dashboard,
                folder=self._private / "ray",
                allow_open=cluster.allow_open_ray,
            )
        self.on_ray()
        self.alone = is_alone()
        if plan.num_bundles:
            self._group, self._bundles = place_devices(plan.device, plan.num_bundles, cluster.placement_timeout_s)
        self.say("starting " + ", ".join(self._parts()))
        engine_refs = self._make_engines()
        trainer_refs = self._make_trainers(self._bundles)
        buffer_ready = self._make_router_and_buffer(engine_refs)
        if self.trainers:
            facts = gather(trainer_refs, self.check_stop)
            logger.info("trainers: %s", facts[0])
        facts = ray.get(buffer_ready)
        if facts["num_too_long"]:
            self.say(f"{facts['num_too_long']} prompts are over --rollout-max-prompt-len and left out")
        if self.trainers and self.engines:
            self._plan_pushes()

    def _parts(self) -> list[str]:
        parts = []
        if self.plan.num_engines:
            parts.append(f"{self.plan.num_engines} engine{'s' * (self.plan.num_engines > 1)} and the router")
        parts += ["the " + scorer.role.replace("-", " ") for scorer in self.plan.scorers]
        if self.plan.layout:
            parts.append(f"{self.plan.layout.world_size} trainer{'s' * (self.plan.layout.world_size > 1)}")
        return parts or ["the Buffer"]

    def _env(self, address: str | None = None) -> dict[str, str]:
        """Environment of every actor: imports from the folder the command ran in, one collective interface."""
        paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
        if self.alone and self._private is not None:
            env[FOLDER_VARIABLE] = str(self._private / "stores")
        else:
            env[PEERS_VARIABLE] = ",".join(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        interface = interface_of(LOOPBACK if self.alone else address or LOOPBACK)
        if interface:
            env["GLOO_SOCKET_IFNAME"] = interface
        if self.plan.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that the machine has, but the run does not use
        else:
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
            if interface and not self.alone:
                env["NCCL_SOCKET_IFNAME"] = interface
        return env

    @property
    def _umask(self) -> int:
        return umask_of(self.config.run.run_dir_mode)

    def _log(self, role: str) -> str:
        return str(self.run_dir / "logs" / f"{role}.a{self.attempt}.log")

    def _make_engines(self) -> list[Any]:
        """The actors of all engines; references of their addresses."""
        if not self.plan.num_engines:
            return []
        self.api_key = secrets.token_hex(24)  # no dash: a key that begins with one reads as a flag
        self.engines = [self._make_policy_engine(index) for index in range(self.plan.num_engines)]
        reward, algorithm = self.config.reward, self.config.algorithm
        own_args = {"reward-model": reward.rm_server_args, "teacher": algorithm.opd_teacher_server_args}
        for scorer in self.plan.scorers:
            self.scorers[scorer.role] = [
                self._make_engine(scorer.role, index, scorer.model_path, places, own_args[scorer.role])
                for index, places in enumerate(scorer.bundles)
            ]
        return [engine.start.remote() for engine in self._all_engines()]

    def _make_policy_engine(self, index: int) -> Any:
        server_args = dict(self.config.passthrough.sglang)
        if self.plan.device == "cuda" and self.plan.is_colocated and self.config.cluster.offload_rollout:
            server_args.setdefault("enable_memory_saver", True)
        if self.config.weights.pause_generation_mode == "in_place":
            # SGLang drops its prefix cache only where no request runs; kept, it would answer from the weights before.
            server_args.setdefault("disable_radix_cache", True)
        if self.config.algorithm.use_rollout_routing_replay and self.plan.device == "cuda":
            server_args.setdefault("enable_return_routed_experts", True)
        if self.config.rollout.stream_responses:  # else each event repeats all tokens so far
            server_args.setdefault("incremental_streaming_output", True)
        folder = str(self.config.model.hf_checkpoint)
        return self._make_engine("engine", index, folder, self.plan.engine_bundles[index], server_args)

    def _make_engine(
        self,
        role: Literal["engine", "reward-model", "teacher"],
        index: int,
        model_path: str,
        bundles: Sequence[int],
        server_args: dict[str, Any],
    ) -> Any:
        places = [self._bundles[i] for i in bundles]
        first = places[0]
        if len({place.node_id for place in places}) > 1:
            flag = {"engine": "--rollout", "reward-model": "--rm", "teacher": "--opd-teacher"}[role]
            raise ValueError(
                f"{role} {index} would span several nodes ({flag}-num-gpus-per-engine {len(places)}),"
                " which is not available yet"
            )
        spec = EngineSpec(
            index=index,
            model_path=model_path,
            device=self.plan.device,
            dtype=_TORCH_DTYPES[self.plan.rollout_dtype],
            tp_size=len(places),
            gpu_ids=tuple(place.device_id for place in places),
            host=LOOPBACK if self.alone else first.node_address,
            api_key=self.api_key,
            log_dir=str(self.run_dir / "logs"),
            seed=self.config.data.rollout_seed + index,
            start_timeout_s=self.config.rollout.engine_start_timeout_s,
            num_threads=self.config.rollout.engine_num_threads,
            server_args=dict(server_args),
            role=role,
        )
        return actor_on(EngineWorker, first, self._group, env=self._env(first.node_address), max_concurrency=8).remote(
            spec, self._log(f"{role}-actor-{index}"), Settled(self._umask)
        )

    def _all_engines(self) -> list[Any]:
        return self.engines + [engine for engines in self.scorers.values() for engine in engines]

    def _make_trainers(self, bundles: list[Bundle]) -> list[Any]:
        if self.plan.layout is None:
            return []
        config = pinned(self.config, self.plan)
        actors = self._trainer_group(config, [bundles[place] for place in self.plan.trainer_bundles])
        self.trainers.actors, groups = actors, [actors]
        if (auxiliary := self.plan.auxiliary) is not None:
            places = [bundles[place] for place in auxiliary.bundles]
            self.trainers.auxiliaries = self._trainer_group(
                auxiliary_config(config, auxiliary.role), places, auxiliary.role
            )
            groups.append(self.trainers.auxiliaries)
        refs = []
        for group in groups:
            address, port = ray.get(group[0].node_address.remote())
            refs += [trainer.setup.remote(address, port) for trainer in group]
        return refs

    def _trainer_group(self, config: Config, places: list[Bundle], role: Role | None = None) -> list[Any]:
        made = []
        for rank, bundle in enumerate(places):
            env = self._env(bundle.node_address)
            env["OMP_NUM_THREADS"] = str(self.plan.train_num_threads)
            made.append(
                actor_on(TrainerWorker, bundle, self._group, env=env, max_concurrency=1).remote(
                    config,
                    self.plan,
                    rank,
                    str(self.run_dir),
                    bundle.device_id,
                    LOOPBACK if self.alone else bundle.node_address,
                    self._log(f"{role or 'trainer'}-{rank}"),
                    role,
                    Settled(self._umask, self._hook_secrets),
                )
            )
        return made

    def _make_router_and_buffer(self, engine_refs: list[Any]) -> Any:
        router_url, scorer_urls = "", dict[str, tuple[str, ...]]()
        if engine_refs:
            host = LOOPBACK if self.alone else ray.util.get_node_ip_address()
            self.router = Router(
                host,
                str(self.run_dir / "logs"),
                api_key=self.api_key,
                router_args=self.config.passthrough.router,
            )
            router_url = self.router.start()
            urls = iter(gather(engine_refs, self.check_stop))
            self.urls = [next(urls) for _ in self.engines]
            for role, engines in self.scorers.items():
                scorer_urls[role] = tuple(next(urls) for _ in engines)
            for url in self.urls:
                self.router.add_worker(url, self.api_key)
            self._recovery = self._make_recovery(self.router)
        endpoints = EngineEndpoints(
            router_url,
            tuple(self.urls),
            self.api_key,
            rm_urls=scorer_urls.get("reward-model", ()),
            teacher_urls=scorer_urls.get("teacher", ()),
        )
        self.buffer = actor_on(BufferWorker, None, None, env=self._env()).remote(
            self.config,
            self.plan,
            str(self.run_dir),
            self.attempt,
            endpoints,
            self._log("buffer"),
            Settled(self._umask, self._hook_secrets),
        )
        return self.buffer.setup.remote()

    def _make_recovery(self, router: Router) -> Recovery | None:
        rollout = self.config.rollout
        if not rollout.use_fault_tolerance:
            return None
        return Recovery(
            self.engines,
            self.urls,
            router,
            self._make_policy_engine,
            api_key=self.api_key,
            interval_s=rollout.rollout_health_check_interval,
            timeout_s=rollout.rollout_health_check_timeout,
            first_wait_s=rollout.rollout_health_check_first_wait,
            say=self.say,
        )

    def _plan_pushes(self) -> None:
        restarts = self._recovery.num_restarts if self._recovery else {}
        self._targets = [
            EngineTarget(i, engine, self._bundles[places[0]].node_id, places, restarts.get(i, 0), self._engine_ep_size)
            for i, (engine, places) in enumerate(zip(self.engines, self.plan.engine_bundles, strict=True))
        ]
        if self.plan.transport == "ipc" and self.plan.device == "cuda":
            self._feeds = plan_feeds(self._targets, self.plan.trainer_bundles)

    @property
    def _engine_ep_size(self) -> int:
        """Parts into which an engine's ranks divide the experts, in order; 1 where it deals them out in its own way."""
        args = self.config.passthrough.sglang
        own_way = ("ep_num_redundant_experts", "enable_eplb", "init_expert_location", "moe_dp_size")
        return 1 if any(args.get(name) for name in own_way) else int(args.get("ep_size") or 1)

    # ------------------------------------------------------------------------------------ work
    def push(self, version: int) -> dict[str, float]:
        """Push the trainers' weights to every engine as `version`; verified as --verify-weights says.

        With --use-fault-tolerance engines that died are back after it; one that dies meanwhile is replaced, and all
        get the weights again.
        """
        if self._recovery is None:
            return self._push(version)
        if not self._shares_memory:
            self._recovery.check(is_generating=False)
        for attempt in range(_MAX_PUSHES):
            self._finish_starts()
            try:
                metrics = self._push(version)
                break
            except WeightMismatch:
                raise
            except (ray.exceptions.RayError, RuntimeError) as error:
                # Where memory is shared, nobody knows who has given back what in the middle of a push.
                if self._shares_memory or attempt + 1 == _MAX_PUSHES or not self._recovery.find_hung():
                    raise
                logger.warning("the push of version %d is made again: %s", version, root_cause(error))
        metrics["sync/engines_restarted"] = float(self._recovery.num_out)
        self._join()
        return metrics

    def _finish_starts(self) -> None:
        """Wait for the engines that start in the place of dead ones."""
        if self._recovery is not None and self._recovery.num_out:
            self.say("waiting for engines that start again")
            started = self._recovery.finish_starts(self.check_stop)
            if self._engines_away:
                ray.get([self.engines[index].release_memory.remote(None) for index in started])
            if self.trainers:
                self._plan_pushes()

    def _join(self) -> None:
        """Engines that are started and have the current weights get requests."""
        if self._recovery is not None and self._recovery.num_out:
            self._recovery.join()
            ray.get(self.buffer.set_engines.remote(self.urls))

    def _restore(self) -> None:
        """Before a round: engines that died since the last push (in an evaluation, or where none comes) are back."""
        if self._recovery is None or not self._recovery.num_out:
            return
        if self.trainers:
            self.release_engine_memory()
            self.push(self._version)
        else:
            self._finish_starts()
            self._join()

    @property
    def _shares_memory(self) -> bool:
        """Colocated on GPUs: engines and trainers take turns."""
        return self.plan.device == "cuda" and self.plan.is_colocated and self.config.cluster.offload_rollout

    def _push(self, version: int) -> dict[str, float]:
        weights = self.config.weights
        shared = self._shares_memory and self._engines_away
        if shared:
            # First room for the engines' weights, and after the push for their caches: never all of both sides at once.
            self.trainers.offload(keep_weights=True)
            ray.get([engine.resume_memory.remote(["weights"]) for engine in self.engines])
        assert self.plan.transport is not None
        mode, timeout_s = weights.pause_generation_mode, weights.update_weight_timeout_s
        if self.plan.transport == "disk":
            metrics = push_by_disk(
                self.trainers.actors,
                self._targets,
                version=version,
                local_folder=self._local_weights,
                keep_files=weights.update_weight_disk_keep_files,
                pause_mode=mode,
                timeout_s=timeout_s,
            )
        else:
            metrics = push_weights(
                self.trainers.actors,
                self._targets,
                self._feeds,
                version=version,
                transport=self.plan.transport,
                pause_mode=mode,
                timeout_s=timeout_s,
            )
        if shared:
            self.trainers.offload()
            ray.get([engine.resume_memory.remote(["kv_cache", "cuda_graph"]) for engine in self.engines])
            self._engines_away = False
        is_first = self._num_pushes == 0
        self._version = version
        if weights.verify_weights == "always" or (weights.verify_weights == "first" and is_first):
            metrics.update(self._verify(version))
        self._num_pushes += 1
        return metrics

    @property
    def _local_weights(self) -> str | None:
        """On each host of engines, this run's folder in --update-weight-local-checkpoint-dir."""
        folder = self.config.weights.update_weight_local_checkpoint_dir
        name = f"{self.run_dir.name}-{hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:8]}"
        return None if folder is None else str(Path(folder).absolute() / name)

    def _verify(self, version: int) -> dict[str, float]:
        is_fp32 = self.plan.precision == self.plan.rollout_dtype == "fp32"
        return verify_push(
            self.trainers.actors,
            self._targets,
            self.urls,
            api_key=self.api_key,
            vocab_size=self.plan.shape.vocab_size,
            version=version,
            temperature=self.config.rollout.rollout_temperature,
            tolerance=self.config.weights.verify_tolerance or (1e-4 if is_fp32 else 0.1),
            is_exact=self.plan.device == "cpu",
        )

    def release_engine_memory(self) -> None:
        """Colocated on GPUs: the engines give their memory back before the trainers work."""
        if self._shares_memory:
            if self._recovery is not None:
                self._recovery.check(is_generating=False)
            self._finish_starts()  # a new engine loads where the trainers do not need the memory yet
            ray.get([engine.flush_cache.remote() for engine in self.engines])
            ray.get([engine.release_memory.remote(None) for engine in self.engines])
            self._engines_away = True

    def generate(self, rollout_id: int) -> Any:
        """The Buffer's `Rollout`; of an engine that dies meanwhile the death is reported, not its consequences."""
        self._restore()
        self.trainers.offload()
        before = self._faults()
        rollout = self._watched(self.buffer.generate.remote(rollout_id, self._version))
        self._add_faults(rollout.metrics, "rollout", before)
        for text in rollout.warnings:
            logger.warning("%s", text)
        return rollout

    def add_trained(self, rollout_id: int) -> None:
        """Let the Buffer write what training found out about single samples; does not wait for it."""
        self._finish_adding()
        self._adding = self.buffer.add_trained.remote(rollout_id, self.trainers.sample_columns(rollout_id))

    def _finish_adding(self) -> None:
        adding, self._adding = self._adding, None
        if adding is not None:
            ray.get(adding)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation on every set."""
        self._restore()
        self.trainers.offload()
        before = self._faults()
        metrics = self._watched(self.buffer.evaluate.remote(step))
        self._add_faults(metrics, "eval", before)
        return metrics

    def validation_losses(self) -> dict[str, float]:
        """--mode sft: eval/<set>/loss and eval/<set>/num_tokens of each validation set."""
        return self.trainers.validation_losses(ray.get(self.buffer.validation_shards.remote()))

    def _faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: what has gone wrong so far, as the driver and the router count it."""
        if self._recovery is None or self.router is None:
            return {}
        found = {"engines_died": float(self._recovery.num_died)}
        try:
            found["requests_retried"] = float(self.router.num_retries())
        except RuntimeError as error:  # a number alone: a busy machine may hold its answer up
            logger.warning("the router does not say how many requests it sent again: %s", error)
        return found

    def _add_faults(self, metrics: dict[str, float], prefix: str, before: dict[str, float]) -> None:
        """What went wrong since `before`; the rollout has counted the retries of its own client."""
        for name, count in self._faults().items():
            key = f"{prefix}/{name}"
            metrics[key] = metrics.get(key, 0.0) + count - before.get(name, count)

    def _watched(self, ref: Any) -> Any:
        """Wait for the Buffer's answer, looking after the engines: a dead one is an error at once, or replaced."""
        if self._recovery is not None:
            self._recovery.begin_round()
        while True:
            done, _ = ray.wait([ref], timeout=1.0)
            if done:
                try:
                    return ray.get(ref)
                except ray.exceptions.RayTaskError:
                    self.check_engines()  # raises, with the engine's log, where a dead engine is the cause
                    raise
            self.check_engines()
            self.check_stop()

    def check_engines(self) -> None:
        """Raise with the end of its log when an engine's server is dead; with --use-fault-tolerance, when all are."""
        others = [engine for engines in self.scorers.values() for engine in engines]
        if self._recovery is not None:
            self._recovery.check()
        else:
            others += self.engines
        ray.get([engine.check_alive.remote() for engine in others])

    def begin_save(self, path: Path, rollout_id: int) -> None:
        """The Buffer's cursor and the trainers' checkpoint, where the mode changes weights, into the folder `path`.

        When this returns, training may go on; the checkpoint is complete after `finish_save`.
        """
        save = self.buffer.save.remote(str(path / "buffer.json"), rollout_id)
        gather([save, *self.trainers.begin_save(path, rollout_id)])

    def state_hashes(self) -> dict[str, Any]:
        """SHA-256 of the Buffer's state, and of each trainer's weights, optimizer and RNG states."""
        buffer = self.buffer.state_hash.remote()
        return {
            "buffer": ray.get(buffer),
            "trainers": self.trainers.state_hashes(),
        }

    def load(self, path: Path) -> None:
        """The inverse of `save`."""
        _, *restored = gather([self.buffer.load.remote(str(path / "buffer.json")), *self.trainers.load(path)])
        self.rng_restored = all(facts["rng_restored"] for facts in restored)

    # ------------------------------------------------------------------------------------ end
    def _keep_ray_logs(self) -> None:
        """After a failure: Ray's own logs, which are removed with its other files, in the run's folder."""
        if self._private is None or not (found := list(self._private.glob("ray/session_2*/logs"))):
            return
        target = self.run_dir / "logs" / f"ray.a{self.attempt}"
        try:
            shutil.copytree(found[0], target, ignore=shutil.ignore_patterns("export_events", "old"))
        except (shutil.Error, OSError) as error:  # files that are still written; must not hide the failure
            logger.debug("Ray's logs could not all be kept: %s", error)

    def close(self) -> None:
        """End every process of the run. Idempotent; never raises what would hide the error that led here."""
        try:
            if ray.is_initialized():
                self._end_actors()
        finally:
            if self._guard is not None:
                self._guard.close()  # it removes the private folder
                self._guard, self._private = None, None

    def _end_actors(self) -> None:
        if self._adding is not None:
            ray.wait([self._adding], timeout=_ADD_TIMEOUT_S)  # its failure may be the consequence of another
            self._adding = None
        stops = [engine.shutdown.remote() for engine in self._all_engines()]
        if self.router is not None:
            self.router.shutdown()
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_ENGINE_STOP_TIMEOUT_S)
        if self.plan.transport == "disk" and self._targets and not self.config.weights.update_weight_disk_keep_files:
            drop_files(self.trainers.actors, self._targets, self._local_weights)
        for actor in [*self.trainers.actors, *self.trainers.auxiliaries, *self._all_engines(), self.buffer]:
            if actor is not None:
                ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self.trainers = TrainerGroups(self.config, self.plan)
        self.engines, self.scorers, self.buffer = [], {}, None
        self.router = self._group = None
        ray.shutdown()


def _private_folder() -> Path:
    """A new folder that this user alone can read, by a path that is short enough for Ray's sockets (107 characters)."""
    name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_TMPDIR_BYTES:
        logger.warning(
            "%s=%s is not used: Ray's sockets leave it at most %d characters, it has %d; Ray's files go to /tmp",
            *(name, parent, _MAX_TMPDIR_BYTES, len(os.fsencode(parent))),
        )
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="fusionrl-", dir=parent))
    for name in ("ray", "stores"):
        (folder / name).mkdir(mode=0o700)
    return folder
