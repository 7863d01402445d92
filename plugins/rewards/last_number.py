"""A reward of 1 where the last number of the response equals the label, and of 0 anywhere else.

    --custom-rm-path plugins.rewards.last_number.reward

The whole convention is "the last number counts": reasoning before it is free, a second guess after it is not.
"""

from __future__ import annotations

import re
from typing import Any

from fusionrl.rewards.registry import grade

# 1,234.5 and 1234.5 and -7 and .5. A minus sign belongs to the number unless what stands before it makes it a
# subtraction: 12-7 and (3)-7 end in 7, "is -7" and "=-7" in -7.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def last_number(text: str) -> str | None:
    """The last number in `text` as written there, without thousands separators; None where there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """1.0 where the last number of `sample.response` equals `sample.label`, else 0.0, as `--rm-type last_number`.

    Raises `ValueError` where the label is missing or is not a number: such a row could never be rewarded.
    """
    return grade("last_number", sample.response or "", sample.label, sample.metadata).reward
