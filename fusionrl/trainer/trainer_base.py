"""A trainer of any role: its rank's model, and the stages that all roles have (see `stages.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.config.hooks import HookError, user_code
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.observe.spans import phase
from fusionrl.trainer.model_rank import ModelRank, SetupFacts

if TYPE_CHECKING:
    import numpy as np

    from fusionrl.data.train_batch import TrainShard
    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.packed_batch import BatchOptions
    from fusionrl.trainer.sample_columns import SampleColumns
    from fusionrl.trainer.score import Scorer
    from fusionrl.trainer.shard_pull import ColumnSource, ShardSource
    from fusionrl.trainer.stages import Prepared
    from fusionrl.trainer.step_report import StepReport
    from fusionrl.trainer.steps import SkipWatch, Stepping


MAX_NAMED = 16  # samples in a message


@dataclass(frozen=True)
class Learned:
    """A report for each optimizer step on a shard, metrics of its preparation, and values of its single samples."""

    reports: list[StepReport]
    metrics: dict[str, float]
    samples: SampleColumns

    @property
    def num_tokens(self) -> float:
        """Tokens that were trained on."""
        return sum(report.numbers["num_tokens"] for report in self.reports)


def _pooled(parts: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Return means over the tokens of several shards, and sums of the numbers of tokens that were left out."""
    pooled: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in parts for name in metrics):
        values = [(metrics[name], num_tokens) for metrics, num_tokens in parts if name in metrics]
        if name.endswith("_excluded"):
            pooled[name] = sum(value for value, _ in values)
        else:
            pooled[name] = sum(v * n for v, n in values) / max(sum(n for _, n in values), 1.0)
    return pooled


class TrainerBase(ModelRank):
    """A rank that scores and trains."""

    _skips: SkipWatch

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """As of `ModelRank`."""
        facts = super().setup(master_addr, master_port)
        from fusionrl.trainer.steps import SkipWatch

        self._skips = SkipWatch(self.config.train.max_skipped_steps, self.rank)
        return facts

    @property
    def loss(self) -> LossOptions:
        """The loss of this role."""
        from fusionrl.trainer.loss import LossOptions

        return LossOptions.from_config(self.config, self.role)

    @property
    def batch_options(self) -> BatchOptions:
        """Options of packing micro-batches for training."""
        from fusionrl.trainer.packed_batch import BatchOptions

        return BatchOptions.of(self.config, self.layout, self.shape, self.trained, self.device, self.role)

    @property
    def scorer(self) -> Scorer:
        """The model as it scores."""
        from fusionrl.trainer.score import Scorer

        return Scorer(self.trained, self.layout, self.batch_options, self.weight_sets)

    @property
    def stepping(self) -> Stepping:
        """The model, the loss and the hooks of this role's optimizer steps."""
        from fusionrl.trainer.steps import Stepping

        num_before, knobs = self.counters["optimizer_steps"] + self.counters["skipped"], self.trainer_plan.knobs
        return Stepping(self.config, self.scorer, self.loss, self.hooks, self._skips, num_before, knobs=knobs)

    @phase("score")
    def score(self, shard: ShardSource, weights: str | None = None, only_weights: bool = False) -> list[np.ndarray]:
        """Log-probs of all response tokens; nothing is trained. Of a critic: the value before each of them.

        shard         the shard, or `[ref]` with a Ray reference to it
        weights       a set of `read_weights` or `keep_weights`; None is what is trained
        only_weights  gradients and optimizer stay offloaded, as another process uses the device

        Returns [response_length] fp32 for each sample of the shard, in its order; the same on all ranks of the shard.
        """
        from fusionrl.trainer.model import forget_images
        from fusionrl.trainer.score import score_samples
        from fusionrl.trainer.shard_pull import pull

        self.reload(only_weights)
        try:
            return score_samples(pull(shard), self.scorer, weights=weights, all_responses=True).samples
        finally:
            forget_images(self.trained)

    @contextmanager
    def _pulled(
        self, rollout_id: int, source: ShardSource, columns: Sequence[ColumnSource] = ()
    ) -> Iterator[TrainShard]:
        """Pull this rank's shard, with everything in memory.

        An error of a user's code within it, also of code that is not called as a hook, such as a model's forward pass,
        names the samples that it was at, and the file of the run that has them.
        """
        from fusionrl.trainer.model import forget_images
        from fusionrl.trainer.shard_pull import pull

        self.reload()
        shard = pull(source, columns)
        try:
            with user_code("a user's code in a trainer", None, only_theirs=True):
                yield shard
        except HookError as error:
            if error.positions is not None:
                indices = [str(int(shard.fields["sample_index"][position])) for position in error.positions]
                listing = ", ".join(indices[:MAX_NAMED]) + (", …" if len(indices) > MAX_NAMED else "")
                rollouts = list_rollouts(Path(self.run_dir), "train")
                files = [f", in {rollout.path}" for rollout in rollouts if rollout.rollout_id == rollout_id]
                error.add(f"the samples that it was at: {listing}{''.join(files[-1:])}")
            raise
        finally:
            forget_images(self.trained)

    def learn(self, rollout_id: int, prepared: Prepared) -> tuple[dict[str, float], SampleColumns]:
        """Train on a prepared shard: the stages pack and steps.

        Returns the metrics of the rollout, the same on every rank, and values of this rank's single samples.
        """
        learned = self.take_steps(rollout_id, prepared)
        return self.metrics_of([learned]), learned.samples

    def metrics_of(self, parts: Sequence[Learned]) -> dict[str, float]:
        """Return the metrics of a rollout, pooled over the adapters that learned from it."""
        from fusionrl.trainer.step_report import pooled_metrics

        # With the engine's log-probs as the old ones, the first step's ratios are not 1.
        first_is_old = not self.stepping.loss.use_rollout_log_probs
        reports = [report for part in parts for report in part.reports]
        firsts = list(itertools.accumulate((len(part.reports) for part in parts[:-1]), initial=0))
        metrics = pooled_metrics(reports, first_is_old, firsts)
        metrics |= parts[0].metrics if len(parts) == 1 else _pooled([(p.metrics, p.num_tokens) for p in parts])
        return {f"{self.role or 'train'}/{name}": value for name, value in metrics.items()}

    def take_steps(self, rollout_id: int, prepared: Prepared) -> Learned:
        """Take the optimizer steps of a prepared shard."""
        from fusionrl.trainer.sample_columns import add_token_values, sample_columns
        from fusionrl.trainer.steps import take_steps

        counters, stepping = self.counters, self.stepping
        reports, token_scores = take_steps(prepared, stepping, rollout_id)
        num_skipped = sum(int(report.numbers["skipped"]) for report in reports)
        counters["skipped"] += num_skipped
        counters["optimizer_steps"] += len(reports) - num_skipped
        counters["rollout_id"] = rollout_id
        self.trained.is_amid = False
        samples: SampleColumns = {}
        at = self.layout.coordinates(self.rank)
        if stepping.loss.mode == "rl" and (at.tp, at.cp, at.pp) == (0, 0, self.layout.pp - 1):
            samples = sample_columns(prepared.shard, token_scores)
            if self.config.run.save_token_values:
                add_token_values(samples, prepared.shard, token_scores)
        return Learned(reports, prepared.metrics, samples)
