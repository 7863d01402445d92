"""What a user's conversion function returns, and what is said of its mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fusionrl.data.convert import samples_of
from fusionrl.data.sample import Status

GOOD: dict[str, Any] = {"tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [1, 0]}


def test_columns_become_samples() -> None:
    samples, rewards, raw, extra = samples_of(GOOD | {"truncated": [0, 1], "mine": ["a", "b"]}, [], "--flag f")
    assert [s.response_length for s in samples] == [2, 1] and rewards == raw == [1.0, 0.0]
    assert [s.status for s in samples] == [Status.COMPLETED, Status.TRUNCATED]
    assert extra == {"mine": ["a", "b"]}
    assert samples[0].group_index != samples[1].group_index


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": [1.0, math.nan]}, r"--flag f: raw_reward\[1\] is nan; a reward must be a finite number"),
        ({"rewards": [math.inf, 0.0], "raw_reward": [1, 0]}, r"--flag f: rewards\[0\] is inf"),
        ({"rewards": [1.0]}, "--flag f: 'rewards' has 1 entries, 'tokens' has 2"),
        ({"loss_masks": [[1, 1], [1, 1]]}, "--flag f: sample 1: loss_mask has 2 values for 1 response tokens"),
    ],
    ids=str,
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples_of(GOOD | changed, [], "--flag f")
