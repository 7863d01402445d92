"""Room `rewards`: graders, and the dispatch from a sample to its reward.

Imports neither ray, megatron nor sglang.
"""

from fusionrl.rewards.dispatch import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm"]
