"""A reward for numbers with partial credit: how much of the answer is right, digit by digit.

    --custom-rm-path plugins.rewards.digits.reward

1 for the right number, else half the share of digits that stand right (0 where the number of digits is wrong). A group
whose samples are all wrong still says which of them were less wrong, so that few samples go a long way.
"""

from typing import Any


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """Score `sample.response` against `sample.label`, in [0, 1]; 1 only for the label itself."""
    answer, label = sample.response.strip(), str(sample.label)
    if answer == label:
        return 1.0
    if len(answer) != len(label):
        return 0.0
    return 0.5 * sum(a == b for a, b in zip(answer, label, strict=True)) / len(label)
