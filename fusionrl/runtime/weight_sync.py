"""`WeightSync`: the version of the engines' weights, the push that changes it, and its verification."""

from __future__ import annotations

import hashlib
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from fusionrl.base.wording import headline
from fusionrl.config.config import Config
from fusionrl.config.pipeline import pause_mode
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget, plan_feeds
from fusionrl.plan.trained_parts import adapter_folders, adapters_of, has_several_adapters
from fusionrl.runtime.engine_pool import CACHES, EnginePool
from fusionrl.runtime.engine_specs import TORCH_DTYPES
from fusionrl.runtime.supervisor import root_cause
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.weights.push import Push, drop_files
from fusionrl.weights.remote_calls import merge_loss, wait_all
from fusionrl.weights.verify import Verification, WeightMismatch

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from fusionrl.runtime.external_engines import ExternalEngines

logger = logging.getLogger(__name__)

_LOUD_LOSS = 0.1  # of what adapters add to weights
_MAX_PUSHES = 3  # with --use-fault-tolerance: of one version, where engines die meanwhile


METRICS = """
sync/engines_restarted | engines | Engines that joined with this push in place of dead ones. | --use-fault-tolerance
sync/engines_left_out | engines | Engines whose node died, and for which Ray has no device so far: the others generate
    alone. | --use-fault-tolerance
train/lora_merge_loss | share | ‖round(W + s B A) - (W + s B A)‖ / ‖s B A‖ over the weights with adapters: what the
    engines' precision loses of what adapters add. 1: engines have the weights without adapters. 0 before the first
    step, and in fp32. | --lora-push merged
"""


class WeightSync:
    """Brings the trainers' weights to the engines."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        run_dir: Path,
        trainers: TrainerGroups,
        engines: EnginePool,
        api_key: str,
        external_engines: ExternalEngines | None = None,
    ) -> None:
        """`external_engines` are engines of others, which get every push."""
        self._config, self._plan, self._api_key = config, plan, api_key
        self._trainers, self._engines, self._external_engines = trainers, engines, external_engines
        self.version = 0
        """Of the last push."""
        self._num_pushes = 0
        self._has_warned_of_loss = False
        self._is_written = False  # files of a disk push may be there
        self._verified = set[tuple[int, int, str]]()  # processes of engines that had a verified push
        self._verified_from: list[ActorHandle] = []  # the trainers that made the last one
        self._have_base = set[tuple[int, int, str]]()  # processes of engines that get no more than adapters
        folder = config.weights.update_weight_local_checkpoint_dir
        name = f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"
        # On each host of engines, this run's folder in --update-weight-local-checkpoint-dir.
        self._local_folder = None if folder is None else str(Path(folder).absolute() / name)

    def push(self, version: int, to_evaluation: bool = False) -> dict[str, float]:
        """Push the trainers' weights to every engine as `version`; verified as --verify-weights says.

        Engines that only evaluate get the first push, and then those `to_evaluation`; they must be idle.

        With --use-fault-tolerance engines that died are back after it; one that dies meanwhile is replaced, and all
        get the weights again. The same holds of engines of others, which are then lost; but not where memory is shared.
        """
        with phase("push", version=version):
            reaches_all = to_evaluation or self._num_pushes == 0
            if self._engines.is_recovering and not self._plan.engines_give_memory:
                self._engines.check(is_generating=False)
                self._engines.check_answers(reaches_all)
            for num_pushes in itertools.count(1):
                if self._engines.is_recovering:
                    self._engines.finish_starts(reaches_all)
                try:
                    metrics = self._push_once(version, reaches_all)
                    break
                except (ray.exceptions.RayError, RuntimeError) as error:
                    # Where memory is shared, it is unknown who has given back what in the middle of a push.
                    if self._plan.engines_give_memory or not self._lose_culprits(error, reaches_all, num_pushes):
                        raise
                    logger.warning("the push of version %d is repeated: %s", version, headline(str(root_cause(error))))
            if self._engines.is_recovering:
                metrics["sync/engines_restarted"] = float(self._engines.admit(reaches_all))
                metrics["sync/engines_left_out"] = float(len(self._engines.left_out_numbers))
            if self._external_engines is not None:
                self._external_engines.admit()
            return metrics

    def _lose_culprits(self, error: Exception, reaches_all: bool, num_pushes: int) -> bool:
        """After a push that failed, take out the engines that broke it. Return whether there are any."""
        may_be_own = self._engines.is_recovering and not isinstance(error, WeightMismatch) and num_pushes < _MAX_PUSHES
        if may_be_own and self._engines.check_answers(reaches_all, makes_tokens=True):
            return True
        return self._external_engines is not None and self._external_engines.drop_culprits(root_cause(error))

    def prepare_round(self) -> None:
        """Before engines generate: bring back those that died since the last push (in an evaluation, or where none
        comes); trainers give their memory away where the two take turns."""
        if not self._trainers:  # no push takes them back
            self._engines.start_left_out()
        if self._engines.num_out and self._trainers:
            self._engines.release_memory()
            self.push(self.version)
        elif self._engines.num_out:
            self._engines.finish_starts()
            self.load_adapters()
            self._engines.admit()
        self._trainers.offload()

    def load_adapters(self) -> None:
        """Without trainers: let engines that are new load the adapters out of their folders, as version 0."""
        if self._plan.layout is not None or self._plan.lora_push != "adapter":
            return
        from fusionrl.weights.adapters import folder_files, send_files  # with torch

        spec, dtype = adapters_of(self._config, self._plan.shape), TORCH_DTYPES[self._plan.rollout_dtype]
        assert spec is not None, "the run has adapters"
        files = {
            name: folder_files(str(folder), spec, self._plan.shape, dtype)
            for name, folder in adapter_folders(self._config).items()
        }
        lacking = self._lacking(self._engines.targets())
        send_files(files, list(lacking.values()), self.version, self._config.weights.update_weight_timeout_s)
        self._have_base |= lacking.keys()

    def _push_once(self, version: int, reaches_all: bool) -> dict[str, float]:
        targets = self._engines.targets()
        targets = [target for target in targets if reaches_all or target.index < self._plan.num_engines]
        num_own = len(targets)
        if self._external_engines is not None:
            targets = targets + self._external_engines.targets()
        check = self._verification(targets, num_own, version) if self._is_verified(targets) else None
        # On shared devices: first room for the engines' weights, then for their caches (`plan/devices.py`).
        if self._plan.takes_turns:
            self._trainers.offload(keep_weights=True)
        is_away = self._engines.is_memory_away
        if is_away:
            self._engines.resume_memory(["weights"], is_last=False)
        metrics = self._transfer(version, targets)
        if self._plan.lora_push == "merged":
            metrics["train/lora_merge_loss"] = self._merge_loss()
        self.version = version
        if check is not None:
            check.compare_tensors()
        self._give_to_engines(is_away)
        if check is not None:
            check.ask_probe()
            if is_away:
                self._engines.release_memory(CACHES)
            metrics |= check.judge()
            self._verified_from = list(self._trainers.policy)
            self._verified |= {target.process for target in targets}
            self._give_to_engines(is_away)
        self._num_pushes += 1
        return metrics

    def _is_verified(self, targets: list[EngineTarget]) -> bool:
        """Return whether the next push, to these engines, is to be verified: by default the first to a process, or
        from trainers that were started again, is."""
        weights = self._config.weights
        if weights.verify_weights != "first":
            return weights.verify_weights == "always"
        interval = weights.verify_weights_interval
        is_due = interval is not None and self._num_pushes % interval == 0
        is_new = self._verified_from != self._trainers.policy
        return is_due or is_new or any(target.process not in self._verified for target in targets)

    def _give_to_engines(self, is_away: bool) -> None:
        """On shared devices: the trainers give their memory away, and engines whose caches are away get them back."""
        if self._plan.takes_turns:
            self._trainers.offload()
        if is_away:
            self._engines.resume_memory(CACHES, is_last=True)

    def _transfer(self, version: int, targets: list[EngineTarget]) -> dict[str, float]:
        """Push what has changed: weights, or adapters, before which an engine gets the weights once."""
        if self._plan.lora_push != "adapter":
            return self._transfer_weights(version, targets)
        lacking = self._lacking(targets)
        metrics = self._transfer_weights(version, list(lacking.values())) if lacking else {}
        self._have_base |= lacking.keys()
        adapters = self._begin_push(version, targets).of_adapters()
        added = ("perf/time_sync_s", "sync/prepare_s", "sync/pause_s", "sync/bytes", "sync/calls")
        return metrics | adapters | {name: metrics.get(name, 0.0) + adapters[name] for name in added}

    def _lacking(self, targets: list[EngineTarget]) -> dict[tuple[int, int, str], EngineTarget]:
        """Return the engines whose process has no weights of this run yet: process → engine."""
        return {target.process: target for target in targets if target.process not in self._have_base}

    def _transfer_weights(self, version: int, targets: list[EngineTarget]) -> dict[str, float]:
        weights, transport = self._config.weights, self._plan.transport
        assert transport is not None
        push, mode = self._begin_push(version, targets), pause_mode(self._config, self._plan.knobs)
        if transport == "disk":
            self._is_written = True
            return push.by_disk(self._local_folder, mode, keep_files=weights.update_weight_disk_keep_files)
        feeds = []
        if transport == "ipc" and self._plan.device == "cuda":
            feeds = plan_feeds([target for target in targets if not target.host], self._trainers.plan.trainer_bundles)
        return push.from_memory(feeds, transport, mode)

    def _begin_push(self, version: int, targets: list[EngineTarget]) -> Push:
        return Push(self._trainers.policy, targets, version, self._config.weights.update_weight_timeout_s)

    def _merge_loss(self) -> float:
        """Return the share of what adapters add to the weights that the engines' precision loses."""
        if self._plan.rollout_dtype == "fp32":
            return 0.0
        calls = [(f"trainer {i}", trainer.merge_losses.remote()) for i, trainer in enumerate(self._trainers.policy)]
        loss = merge_loss(wait_all(calls, self._config.weights.update_weight_timeout_s))
        if loss > _LOUD_LOSS and not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            logger.warning(
                "weights with adapters added lose %.0f %% of what these add, as engines hold them in bf16"
                " (train/lora_merge_loss): give --lora-push adapter where engines can take adapters, or --rollout-dtype"
                " fp32; a larger --lr makes the share smaller",
                100 * loss,
            )
        return loss

    def _verification(self, targets: list[EngineTarget], num_own: int, version: int) -> Verification:
        own_urls = self._probe_urls()
        urls = [own_urls[target.index] for target in targets[:num_own]]
        if self._external_engines is not None:
            urls += self._external_engines.pushed_urls
        is_exact = self._config.run.bitwise and self._plan.device == "cpu"
        is_fp32 = self._plan.precision == self._plan.rollout_dtype == "fp32"
        return Verification(
            self._trainers.policy,
            targets,
            urls,
            api_key=self._api_key,
            vocab_size=self._plan.shape.vocab_size,
            version=version,
            temperature=self._config.rollout.rollout_temperature,
            tolerance=0.0 if is_exact else self._config.weights.verify_tolerance or (1e-4 if is_fp32 else 0.1),
            is_exact=self._plan.device == "cpu",
            adapters=tuple(adapter_folders(self._config)) if has_several_adapters(self._config) else (None,),
            placeholder=-1 if (vision := self._plan.shape.vision) is None else vision.image_token,
        )

    def _probe_urls(self) -> list[str]:
        """Return the address that answers for each engine; engines that work in pairs are reached by the router."""
        engines = self._engines
        policy_urls = [engines.router_url] * len(engines.urls) if self._plan.has_pairs else engines.urls
        return [*policy_urls, *engines.evaluation.urls]

    def drop_files(self) -> None:
        """At the end of a run: remove the files of a disk push, if there are any that are not to be kept."""
        keeps = self._config.weights.update_weight_disk_keep_files
        if self._is_written and not keeps:
            drop_files(self._trainers.policy, self._engines.targets(), self._local_folder)
        self._is_written = False
