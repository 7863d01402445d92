"""Between the optimizer steps: what a loss has to know of a whole step before any token of it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from fusionrl.algorithms.losses import LOSSES
from fusionrl.config.config import Config
from fusionrl.data.train_batch import TrainShard
from fusionrl.trainer.loss import LossOptions
from fusionrl.trainer.score import Scorer, score_samples
from fusionrl.trainer.selection import pair_advantages, select_tokens
from fusionrl.trainer.stages import Experts


@dataclass(frozen=True)
class LookAhead:
    """Sets a column of the shard for the losses that choose tokens, or that compare the samples of a pair.

    seed  of the choice in the rollout's first step; the next step's is one higher
    """

    loss: LossOptions
    scorer: Scorer
    seed: int
    dpo_beta: float
    dpo_label_smoothing: float

    @classmethod
    def of(cls, config: Config, loss: LossOptions, scorer: Scorer, num_steps_before: int) -> LookAhead | None:
        """Return the look-ahead of the configuration; None if its loss needs none."""
        if loss.mode != "rl" or not (LOSSES[loss.policy_loss].selects or loss.policy_loss == "dpo"):
            return None
        algorithm, seed = config.algorithm, config.run.seed + num_steps_before
        return cls(loss, scorer, seed, algorithm.dpo_beta, algorithm.dpo_label_smoothing)

    def at(self, shard: TrainShard, index: int, experts: Experts) -> dict[str, float]:
        """Set the column for step `index`, by the weights before it; return metrics. A collective."""
        step = shard.steps[index]
        if index == 0 and "log_probs" in shard.fields:
            log_probs = shard.fields["log_probs"]
        else:
            alone = TrainShard(shard.rollout_id, shard.total_lengths, shard.response_lengths, shard.fields, [step])
            scores = score_samples(alone, self.scorer, planned_only=True, routing="fixed", experts=experts)
            log_probs = scores.flat
        if self.loss.policy_loss == "dpo":
            return pair_advantages(shard, step, log_probs, self.dpo_beta, self.dpo_label_smoothing)
        select_tokens(shard, step, log_probs, self.loss, self.seed + index)
        return {}
