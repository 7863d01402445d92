"""Optimizer steps since a token was sampled: its staleness in the unit in which weights move.

Versions count pushes. A rollout may take several optimizer steps, and several rollouts may be trained between two
pushes, so a token of the newest version may be many steps old.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.token_versions import UNKNOWN_VERSION
from fusionrl.data.train_batch import TrainShard


@dataclass
class StepStaleness:
    """Counts over the shards of a rollout, of which each is added once.

    newest         version of the weights that train it: rollouts that have trained them
    num_untrained  first rollouts of the run that do not train the policy (--num-critic-only-steps)
    """

    newest: int
    num_untrained: int = 0
    num_tokens: int = 0
    total: float = 0.0
    most: int = 0

    @classmethod
    def of(cls, newest: int, config: Config) -> StepStaleness:
        """Return an empty count of a rollout."""
        has_critic = estimator_of(config.algorithm).role == "critic"
        return cls(newest, config.critic.num_critic_only_steps if has_critic else 0)

    def add(self, shard: TrainShard) -> None:
        """Count the trained tokens of a shard. A token trained in the first step by the weights that sampled it is 0
        steps old. Steps that were skipped count.
        """
        versions = shard.fields.get("weight_versions")
        if versions is None or self.newest < self.num_untrained:
            return
        step_of = np.full(shard.num_samples, -1, np.int64)
        for index, step in enumerate(shard.steps):
            step_of[[i for group in step.micro_batches for i in group]] = index
        index_of = np.repeat(step_of, shard.response_lengths)
        counts = (shard.fields["loss_mask"] > 0) & (versions != UNKNOWN_VERSION) & (index_of >= 0)
        sampled = np.maximum(versions[counts].astype(np.int64), self.num_untrained)
        ages = np.maximum(self.newest - sampled, 0) * len(shard.steps) + index_of[counts]
        self.num_tokens += len(ages)
        self.total += float(ages.sum())
        self.most = max(self.most, int(ages.max(initial=0)))

    def metrics(self) -> dict[str, float]:
        """Return mean and maximum over tokens; nothing where no version is known."""
        if not self.num_tokens:
            return {}
        return {
            "rollout/steps_since_sampled/mean": self.total / self.num_tokens,
            "rollout/steps_since_sampled/max": float(self.most),
        }
