"""The trainer class of each role."""

from __future__ import annotations

from fusionrl.algorithms.estimators import Role
from fusionrl.trainer.critic import CriticTrainer
from fusionrl.trainer.policy import PolicyTrainer
from fusionrl.trainer.process_reward import ProcessRewardTrainer

TRAINERS: dict[Role | None, type[PolicyTrainer] | type[CriticTrainer] | type[ProcessRewardTrainer]] = {
    None: PolicyTrainer,
    "critic": CriticTrainer,
    "prm": ProcessRewardTrainer,
}
