"""A trainer of any role: its rank's model, and the stages that all roles have (see `stages.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrl.observe.spans import phase
from fusionrl.trainer.model_rank import ModelRank, SetupFacts

if TYPE_CHECKING:
    import numpy as np

    from fusionrl.trainer.loss import LossOptions
    from fusionrl.trainer.packed_batch import BatchOptions
    from fusionrl.trainer.score import Scorer
    from fusionrl.trainer.shard_pull import ShardSource
    from fusionrl.trainer.skipped_steps import SkipWatch
    from fusionrl.trainer.stages import Prepared, TrainReport
    from fusionrl.trainer.steps import Stepping


class TrainerBase(ModelRank):
    """A rank that scores and trains."""

    _skips: SkipWatch

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """As of `ModelRank`."""
        facts = super().setup(master_addr, master_port)
        from fusionrl.trainer.skipped_steps import SkipWatch

        self._skips = SkipWatch(self.config.train.max_skipped_steps, self.rank, self.layout.world_size)
        return facts

    @property
    def loss(self) -> LossOptions:
        """The loss of this role."""
        from fusionrl.trainer.loss import LossOptions

        return LossOptions.from_config(self.config, self.role)

    @property
    def batch_options(self) -> BatchOptions:
        """Options of packing micro-batches for training."""
        from fusionrl.trainer.batch_options import batch_options

        return batch_options(self.config, self.layout, self.shape, self.trained, self.device, self.role)

    @property
    def scorer(self) -> Scorer:
        """The model as it scores."""
        from fusionrl.trainer.score import Scorer

        return Scorer(self.trained, self.layout, self.batch_options, self.weight_sets)

    @property
    def stepping(self) -> Stepping:
        """The model, the loss and the hooks of this role's optimizer steps."""
        from fusionrl.trainer.staleness_bound import Bound
        from fusionrl.trainer.steps import Stepping

        bound = Bound.of(self.trainer_plan.knobs)
        return Stepping(self.trained, self.device, self.loss, self.hooks, self._skips, bound=bound)

    @phase("score")
    def score(self, shard: ShardSource, weights: str | None = None, only_weights: bool = False) -> list[np.ndarray]:
        """Log-probs of all response tokens; nothing is trained. Of a critic: the value before each of them.

        Args:
            shard: the shard, or `[ref]` with a Ray reference to it.
            weights: a set of `read_weights` or `keep_weights`; None is what is trained.
            only_weights: gradients and optimizer stay offloaded, as another process uses the device.

        Returns:
            For each sample of the shard, in its order, [response_length] fp32; the same on all ranks of the
            shard.

        Raises:
            ValueError: a shard that no loss can be computed from.
        """
        from fusionrl.trainer.score import score_samples
        from fusionrl.trainer.shard_pull import pull

        self.reload(only_weights)
        return score_samples(pull(shard), self.scorer, weights=weights, all_responses=True).samples

    def learn(self, rollout_id: int, prepared: Prepared) -> TrainReport:
        """Train on a prepared shard: the stages pack, steps and report."""
        from fusionrl.trainer.micro_batches import Packing, pack_steps
        from fusionrl.trainer.rollout_report import report
        from fusionrl.trainer.step_statistics import LookAhead
        from fusionrl.trainer.steps import take_steps

        loss, counters = self.loss, self.counters
        num_before = counters["optimizer_steps"] + counters["skipped"]
        look_ahead = LookAhead.of(self.config, loss, self.scorer, num_before)
        packed = pack_steps(prepared, Packing(self.batch_options, self.layout, look_ahead))
        taken = take_steps(packed, self.stepping, rollout_id)
        counters["skipped"] += taken.num_skipped
        counters["optimizer_steps"] += len(taken.reports) - taken.num_skipped
        counters["rollout_id"] = rollout_id
        self.trained.is_amid = False
        at = self.layout.coordinates(self.rank)
        speaks = (at.tp, at.cp, at.pp) == (0, 0, self.layout.pp - 1)
        return report(prepared, taken, loss, prefix=self.role or "train", with_samples=speaks)
