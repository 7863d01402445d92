"""The trainer of PRIME's process reward model: it learns outcomes, and rewards each token by what it has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fusionrl.algorithms.estimators import Role
from fusionrl.observe.spans import phase
from fusionrl.trainer.model_rank import SetupFacts
from fusionrl.trainer.sample_columns import Handed, columns_of
from fusionrl.trainer.trainer_base import TrainerBase

if TYPE_CHECKING:
    from fusionrl.trainer.shard_pull import ShardSource


class ProcessRewardTrainer(TrainerBase):
    """A rank of the process reward model, which is measured against the weights that it starts with."""

    role: ClassVar[Role | None] = "prm"

    def setup(self, master_addr: str, master_port: int) -> SetupFacts:
        """Set up the model, and keep its weights."""
        facts = super().setup(master_addr, master_port)
        self.keep_weights("ref")
        return facts

    @phase("process rewards")
    def process_rewards(self, rollout_id: int, shard: ShardSource) -> Handed:
        """Train on the outcomes of this rank's shard, and then reward each token that is trained on.

        The outcome is 1 where the raw reward is above 0, else 0. Returns `prm/…` metrics over all ranks, the same on
        every rank; and the column process_rewards.
        """
        import numpy as np
        import torch

        from fusionrl.algorithms.token_advantages import implicit_rewards
        from fusionrl.trainer.score import score_samples
        from fusionrl.trainer.stages import Prepared

        with self._pulled(rollout_id, shard) as pulled:
            fields, scorer = pulled.fields, self.scorer
            fields["outcomes"] = np.repeat((fields["raw_rewards"] > 0).astype(np.float32), pulled.response_lengths)
            fields["ref_log_probs"] = score_samples(pulled, scorer, weights="ref").flat
            metrics, _ = self.learn(rollout_id, Prepared(pulled))
        log_probs, before, mask = score_samples(pulled, scorer).flat, fields["ref_log_probs"], fields["loss_mask"]
        tensors = (torch.from_numpy(log_probs), torch.from_numpy(before), torch.from_numpy(mask))
        fields["process_rewards"] = implicit_rewards(*tensors, self.config.prm.prm_beta)[0].numpy()
        return metrics, columns_of(pulled, ("process_rewards",))
