"""Room `rollout`: generate_rollout functions, per-sample generate functions and filters.

Talks to the engines over HTTP alone; imports neither ray, megatron nor sglang.
"""

from fusionrl.rollout.types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput

__all__ = ["DynamicFilterOutput", "RolloutFnEvalOutput", "RolloutFnTrainOutput"]
