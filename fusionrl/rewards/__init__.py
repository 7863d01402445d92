"""Room `rewards`: graders, and the dispatch from a sample to its reward. Imports neither ray, megatron nor sglang.

A reward is a `Reward` in a file of its own, named in `registry`, which parses --rm-type and checks labels. `dispatch`
lets a process of the `pool` make the `reward_call`, and has the metrics.
"""

from fusionrl.rewards.dispatch import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm"]
