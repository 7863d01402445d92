"""`WeightSync`: the version of the engines' weights, the push that changes it, and its verification."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import ray

from fusionrl.cluster.engine_pool import EnginePool
from fusionrl.cluster.ray_cluster import root_cause
from fusionrl.cluster.trainers import TrainerGroups
from fusionrl.config.config import Config
from fusionrl.plan.pipeline import pause_mode
from fusionrl.plan.plan import Plan
from fusionrl.plan.push import EngineTarget, Feed, plan_feeds
from fusionrl.sync.disk_push import drop_files, push_by_disk
from fusionrl.sync.push import push_weights
from fusionrl.sync.verify import WeightMismatch, verify_push

logger = logging.getLogger(__name__)

_MAX_PUSHES = 3  # with --use-fault-tolerance: of one version, where engines die meanwhile


class WeightSync:
    """Brings the trainers' weights to the engines."""

    def __init__(
        self, config: Config, plan: Plan, run_dir: Path, trainers: TrainerGroups, engines: EnginePool, api_key: str
    ) -> None:
        self._config, self._plan, self._api_key = config, plan, api_key
        self._trainers, self._engines = trainers, engines
        self.version = 0
        """Of the last push."""
        self._num_pushes = 0
        self._targets: list[EngineTarget] = []
        self._feeds: list[Feed] = []
        folder = config.weights.update_weight_local_checkpoint_dir
        name = f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"
        # On each host of engines, this run's folder in --update-weight-local-checkpoint-dir.
        self._local_folder = None if folder is None else str(Path(folder).absolute() / name)

    def push(self, version: int, to_evaluation: bool = False) -> dict[str, float]:
        """Push the trainers' weights to every engine as `version`; verified as --verify-weights says.

        Engines that only evaluate get the first push, and then those `to_evaluation`; they must be idle.

        With --use-fault-tolerance engines that died are back after it; one that dies meanwhile is replaced, and all
        get the weights again.
        """
        if not self._engines.is_recovering:
            return self._push_once(version, to_evaluation)
        if not self._plan.engines_give_memory:
            self._engines.check(is_generating=False)
        for attempt in range(_MAX_PUSHES):
            self._finish_starts()
            try:
                metrics = self._push_once(version, to_evaluation)
                break
            except WeightMismatch:
                raise
            except (ray.exceptions.RayError, RuntimeError) as error:
                # Where memory is shared, nobody knows who has given back what in the middle of a push.
                is_last = self._plan.engines_give_memory or attempt + 1 == _MAX_PUSHES
                if is_last or not self._engines.find_hung():
                    raise
                logger.warning("the push of version %d is made again: %s", version, root_cause(error))
        metrics["sync/engines_restarted"] = float(self._engines.num_out)
        self._engines.join()
        return metrics

    def restore_engines(self) -> None:
        """Before a round: engines that died since the last push (in an evaluation, or where none comes) are back."""
        if not self._engines.num_out:
            return
        if self._trainers:
            self._engines.release_memory()
            self.push(self.version)
        else:
            self._engines.finish_starts()
            self._engines.join()

    def _finish_starts(self) -> None:
        if self._engines.finish_starts():
            self._plan_push()

    def _plan_push(self) -> None:
        self._targets = self._engines.targets()
        if self._plan.transport == "ipc" and self._plan.device == "cuda":
            self._feeds = plan_feeds(self._targets, self._plan.trainer_bundles)

    def _push_once(self, version: int, to_evaluation: bool) -> dict[str, float]:
        if not self._targets:
            self._plan_push()
        is_first = self._num_pushes == 0
        targets = self._targets if to_evaluation or is_first else self._targets[: self._plan.num_engines]
        shared = self._engines.is_memory_away
        if shared:
            # First room for the engines' weights, and after the push for their caches: never all of both sides at once.
            self._trainers.offload(keep_weights=True)
            self._engines.resume_memory(["weights"], is_last=False)
        metrics = self._transfer(version, targets)
        if shared:
            self._trainers.offload()
            self._engines.resume_memory(["kv_cache", "cuda_graph"], is_last=True)
        self.version = version
        when = self._config.weights.verify_weights
        if when == "always" or (when == "first" and is_first):
            metrics.update(self._verify(targets))
        self._num_pushes += 1
        return metrics

    def _transfer(self, version: int, targets: list[EngineTarget]) -> dict[str, float]:
        weights, transport = self._config.weights, self._plan.transport
        assert transport is not None
        mode, timeout_s = pause_mode(self._config, self._plan), weights.update_weight_timeout_s
        if transport == "disk":
            return push_by_disk(
                self._trainers.actors,
                targets,
                version=version,
                local_folder=self._local_folder,
                keep_files=weights.update_weight_disk_keep_files,
                pause_mode=mode,
                timeout_s=timeout_s,
            )
        return push_weights(
            self._trainers.actors,
            targets,
            self._feeds,
            version=version,
            transport=transport,
            pause_mode=mode,
            timeout_s=timeout_s,
        )

    def _verify(self, targets: list[EngineTarget]) -> dict[str, float]:
        is_fp32 = self._plan.precision == self._plan.rollout_dtype == "fp32"
        return verify_push(
            self._trainers.actors,
            targets,
            [*self._engines.urls, *self._engines.evaluation.urls][: len(targets)],
            api_key=self._api_key,
            vocab_size=self._plan.shape.vocab_size,
            version=self.version,
            temperature=self._config.rollout.rollout_temperature,
            tolerance=self._config.weights.verify_tolerance or (1e-4 if is_fp32 else 0.1),
            is_exact=self._plan.device == "cpu",
        )

    def drop_files(self) -> None:
        """At the end of a run: remove the files of a disk push, if there are any that are not to be kept."""
        keeps = self._config.weights.update_weight_disk_keep_files
        if self._plan.transport == "disk" and self._targets and not keeps:
            drop_files(self._trainers.actors, self._targets, self._local_folder)
        self._targets = []
