"""The reward function that gives the score of `--rm-type last_number`."""

from __future__ import annotations

import asyncio

import pytest

from fusionrl.data.sample import Sample
from plugins.rewards.last_number import reward


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [("so 46.0", "46", 1.0), ("46 or 47", "46", 0.0), ("", "46", 0.0), ("1e3", "1000", 1.0), ("4", "4%", 1.0)],
)
def test_the_reward_is_the_built_in_one(response: str, label: str, expected: float) -> None:
    assert asyncio.run(reward(None, Sample(prompt="", response=response, label=label))) == expected


@pytest.mark.parametrize("label", [None, "", "forty", "nan"])
def test_a_label_that_is_not_a_number_is_refused(label: object) -> None:
    with pytest.raises(ValueError, match="label"):
        asyncio.run(reward(None, Sample(prompt="", response="4", label=label)))
