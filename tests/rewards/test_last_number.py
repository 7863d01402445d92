"""The last-number reward: what counts as a number, what counts as equal, what is refused."""

from __future__ import annotations

import asyncio

import pytest

from fusionrl.data.sample import Sample
from plugins.rewards.last_number import last_number, reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 3 = 5.", "5"),
        ("is -7", "-7"),
        ("=-7", "-7"),
        ("12-7", "7"),
        ("12 - 7", "7"),
        ("(3)-5", "5"),
        ("$1,234.50 in all", "1234.50"),
        ("10,000,000", "10000000"),
        ("1, 2,3", "3"),
        ("x = .5", ".5"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(("response", "expected"), [("so 46.0", 1.0), ("46 or 47", 0.0), ("", 0.0)])
def test_the_reward_is_the_built_in_one(response: str, expected: float) -> None:
    assert asyncio.run(reward(None, Sample(prompt="", response=response, label="46"))) == expected


@pytest.mark.parametrize("label", [None, "", "forty", "nan"])
def test_a_label_that_is_not_a_number_is_refused(label: object) -> None:
    with pytest.raises(ValueError, match="label"):
        asyncio.run(reward(None, Sample(prompt="", response="4", label=label)))
