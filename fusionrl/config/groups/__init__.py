"""The flags of fusionrl: one pydantic group a topic, one field a flag.

A field `rollout_batch_size` is the flag `--rollout-batch-size`; its description is the help text and the line of
the flag reference. Names are slime's and Megatron's wherever the meaning is the same. Field names are unique over
all groups, so that hooks can be handed one flat namespace.
"""

from __future__ import annotations

from fusionrl.config.groups.algorithm import AlgorithmGroup, CriticGroup, PrmGroup
from fusionrl.config.groups.base import Group
from fusionrl.config.groups.data import DataGroup, EvalGroup
from fusionrl.config.groups.model import ModelGroup, WeightsGroup
from fusionrl.config.groups.pipeline import PipelineGroup
from fusionrl.config.groups.rollout import RejectSamplingGroup, RewardGroup, RolloutGroup
from fusionrl.config.groups.run import CheckpointGroup, ClusterGroup, RunGroup
from fusionrl.config.groups.train import TrainGroup

__all__ = [
    "GROUPS",
    "AlgorithmGroup",
    "CheckpointGroup",
    "ClusterGroup",
    "CriticGroup",
    "DataGroup",
    "EvalGroup",
    "Group",
    "ModelGroup",
    "PipelineGroup",
    "PrmGroup",
    "RejectSamplingGroup",
    "RewardGroup",
    "RolloutGroup",
    "RunGroup",
    "TrainGroup",
    "WeightsGroup",
]

GROUPS: dict[str, type[Group]] = {
    "run": RunGroup,
    "pipelining": PipelineGroup,
    "cluster": ClusterGroup,
    "model": ModelGroup,
    "data": DataGroup,
    "rollout": RolloutGroup,
    "reward": RewardGroup,
    "algorithm": AlgorithmGroup,
    "critic": CriticGroup,
    "prm": PrmGroup,
    "train": TrainGroup,
    "eval": EvalGroup,
    "weights": WeightsGroup,
    "checkpoint": CheckpointGroup,
    "reject_sampling": RejectSamplingGroup,
}
