"""One rollout, stage after stage: collect or replay → score → report → write → accept → choose → cut.

Each stage is a function of the stage before it, in a file of its own; users' functions are called at the borders
between them. The collection is the only stage that waits for engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fusionrl.buffer.accepted import AcceptedSamples
from fusionrl.buffer.batches import CutShards, cut, pair_up, training_samples
from fusionrl.buffer.border import HookBorder
from fusionrl.buffer.collect import Collected, Collector
from fusionrl.buffer.replay import load_samples, save_samples
from fusionrl.buffer.report import report
from fusionrl.buffer.scores import Scored, score
from fusionrl.buffer.staleness import training_version
from fusionrl.buffer.trained import TrainedSamples
from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.plan.plan import Plan


@dataclass
class Rollout:
    """What the driver gets of a rollout: references to one shard a rank, and numbers."""

    rollout_id: int
    shards: list[Any]  # object references; the trainers pull what they stand for
    metrics: dict[str, float] = field(default_factory=dict)
    num_accepted: int = 0
    auxiliary_shards: list[Any] = field(default_factory=list)  # the same samples, cut for the critic's or prm's ranks
    warnings: list[str] = field(default_factory=list, kw_only=True)  # for the console
    facts: RolloutFacts | None = field(default=None, kw_only=True)  # for warnings; not in --mode sft
    glimpses: list[Glimpse] = field(default_factory=list, kw_only=True)  # --log-samples of its samples


class RolloutStages:
    """The stages of a rollout, and the files that they write."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        border: HookBorder,
        collector: Collector,
        writer: RolloutWriter,
        accepted: AcceptedSamples,
        attempt: int,
        put: Callable[[TrainShard], Any],
    ) -> None:
        self._config, self._plan, self._border, self._collector = config, plan, border, collector
        self._writer, self._accepted, self._attempt, self._put = writer, accepted, attempt, put
        self.trained = TrainedSamples(writer)

    def make(self, rollout_id: int, pushed_version: int | None, since: float) -> Rollout:
        """Make rollout `rollout_id`, which began at `since` (`time.monotonic`).

        Raises:
            HookError, RolloutAborted, ValueError: with the flag concerned; nothing of the rollout is kept.
        """
        run = self._config.run
        if run.load_debug_rollout_data:
            collected = Collected(load_samples(run.load_debug_rollout_data, rollout_id, self._plan))
            pushed_version = None  # their versions are those of another run
        else:
            collected = self._collector.collect(rollout_id)
        return self._pass_on(rollout_id, collected, pushed_version, since)

    def _pass_on(self, rollout_id: int, collected: Collected, pushed_version: int | None, since: float) -> Rollout:
        """Take the samples through the stages behind the collection."""
        run = self._config.run
        if run.save_debug_rollout_data:
            save_samples(run.save_debug_rollout_data, rollout_id, collected.samples)
        version = training_version(collected.samples, pushed_version)
        scored = score(collected.samples, self._config, self._border)
        told = report(rollout_id, scored, collected.metrics, version, since, self._border, self._config)
        if run.mode != "sft":
            self._write(rollout_id, scored)
        counts: dict[str, int] = {}
        if run.mode == "reject-sampling":
            counts = self._accepted.add(rollout_id, scored.samples, scored.raw)
        told.metrics |= {f"rollout/{name}": float(count) for name, count in counts.items()}
        del collected  # `cut` takes the samples out of the last list that holds them
        made = self._cut(rollout_id, scored, version)
        return Rollout(
            rollout_id,
            made.shards,
            told.metrics,
            counts.get("accepted", 0),
            made.auxiliary,
            facts=told.facts,
            glimpses=told.glimpses,
        )

    def _write(self, rollout_id: int, scored: Scored) -> None:
        rows = (sample.to_row() for sample in scored.samples)
        path = self._writer.write(rollout_id, self._attempt, rows, kind="train")
        self.trained.wrote(path, scored.samples)

    def _cut(self, rollout_id: int, scored: Scored, version: int | None) -> CutShards[Any]:
        """Cut what is trained on; no shards in a run without trainers, or whose trainers learn nothing."""
        if self._plan.balance is None or self._plan.batch is None or self._config.run.mode not in ("rl", "sft"):
            return CutShards()
        chosen = training_samples(scored, self._config, self._border)
        if self._config.run.mode == "rl" and self._config.algorithm.policy_loss == "dpo":
            chosen = pair_up(chosen, self._plan.batch.num_steps)
        self.trained.gave(rollout_id, chosen.samples, chosen.has_indices)
        return cut(chosen, self._plan, rollout_id, version, self._put)
