"""The score of `--rm-type last_number`, as a reward function to begin one of your own with.

    --custom-rm-path plugins.rewards.last_number.reward

The last number of the response counts: reasoning before it is free, a second guess after it is not.
"""

from typing import Any

from fusionrl.rewards.registry import grade


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """1.0 where the last number of `sample.response` equals `sample.label`, else 0.0.

    Raises `ValueError` where the label is missing or is not a number: such a row could never be rewarded.
    """
    return grade("last_number", sample.response or "", sample.label, sample.metadata).reward
