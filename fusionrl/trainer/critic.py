"""The trainer of PPO's critic: it tells values, and learns the returns that the policy's trainers make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from fusionrl.algorithms.estimators import Role
from fusionrl.models.shape import ModelShape
from fusionrl.observe.spans import phase
from fusionrl.trainer.sample_columns import Handed, columns_of
from fusionrl.trainer.trainer_base import TrainerBase

if TYPE_CHECKING:
    from fusionrl.trainer.shard_pull import ColumnSource, ShardSource


class CriticTrainer(TrainerBase):
    """A rank of the critic, whose value head in place of the output layer is zeros where the checkpoint has none."""

    role: ClassVar[Role | None] = "critic"

    def read_shape(self) -> ModelShape:
        """The shape of --critic-load, with a value head."""
        return super().read_shape().with_value_head()

    @phase("values")
    def values(self, shard: ShardSource) -> Handed:
        """Return the column values: the value before each response token of this rank's shard that is trained on."""
        from fusionrl.trainer.score import score_samples
        from fusionrl.trainer.shard_pull import pull

        self.reload()
        pulled = pull(shard)
        pulled.fields["values"] = score_samples(pulled, self.scorer).flat
        return {}, columns_of(pulled, ("values",))

    def train(self, rollout_id: int, shard: ShardSource, columns: Sequence[ColumnSource] = ()) -> dict[str, float]:
        """Learn the returns of this rank's shard: as of `PolicyTrainer`, with `critic/…` metrics.

        `columns`: what the policy's `prepare` gave on each of its data-parallel ranks: values and returns.
        """
        from fusionrl.trainer.stages import Prepared

        with phase("train", step=rollout_id + 1), self._pulled(rollout_id, shard, columns) as pulled:
            return self.learn(rollout_id, Prepared(pulled))[0]
