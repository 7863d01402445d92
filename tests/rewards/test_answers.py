"""Mathematical answers with the score that a person gives, scored by every built-in mathematical reward."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rewards.numbers import is_equal_number, last_number_in, read_number
from fusionrl.rewards.registry import grade
from plugins.rewards.last_number import reward

ROOT = Path(__file__).parents[2]
FORMS = {  # of a response that each reward reads
    "last_number": "The answer is %s.",
    "math": r"So \boxed{%s}.",
    "deepscaler": r"</think>So \boxed{%s}.",
    "math_verify": r"So \boxed{%s}.",
    "dapo": "Answer: %s",
}


def score(rm_type: str, answer: str, label: str) -> float | str:
    try:
        reward: Any = grade(rm_type, FORMS[rm_type] % answer, label).reward
    except ValueError:
        return "refused"
    return float(reward["acc"]) if isinstance(reward, dict) else float(reward)


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    lines = (ROOT / "tests" / "rewards" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("rm_type", FORMS)
def test_a_reward_agrees_with_a_person_but_where_the_answer_says_so(rm_type: str, answers: list[Any]) -> None:
    if rm_type in ("math", "deepscaler", "math_verify"):
        pytest.importorskip("math_verify")
    for case in answers:
        agrees = score(rm_type, case["answer"], case["label"]) == case["right"]
        assert agrees != (rm_type in case.get("differs", {})), case
    assert len(answers) >= 300 and min(Counter(case["right"] for case in answers).values()) >= 100


def test_the_page_lists_every_disagreement_with_its_reason(answers: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")
    table = page.partition("## Where a reward and a person disagree")[2].partition("\n\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    listed = {(name.strip(" `"), row[2].partition(":")[0].strip()) for row in rows for name in row[1].split(",")}
    assert {pair for case in answers for pair in case.get("differs", {}).items()} == listed
    assert all(len(row[5]) > 20 for row in rows)


@pytest.mark.parametrize(
    ("text", "label", "is_right"),
    [
        ("7-5", "5", True),  # a difference, no negative number
        ("1,2,-3", "-3", True),
        ("12,345,67", "67", True),
        ("on 1/2/2026", "2026", True),
        ("3.14.15", "15", True),
        ("is 1/2.", "0.5", True),
        ("1.6 × 10⁻¹⁹", "1.6e-19", True),
        ("5 €.", "5", True),
        ("٥", "5", True),
        ("x=.5", "0.5", True),
        ("No.5", "5", True),  # the dot ends a word, or dots stand before the number
        ("so we get...5", "5", True),
        ("so we get...5", "0.5", False),
        ("5/0", "0", False),
        ("-$-5", "5", False),
        ("1e99999999999999999999999", "5", False),
        ("1e999999999", "1/3", False),
        ("1" * 5000 + "/3", "1/3", False),
    ],
)
def test_numbers_in_a_text(text: str, label: str, is_right: bool) -> None:
    assert score("last_number", text, label) == is_right


def test_long_numbers_take_no_time_and_keep_every_digit() -> None:
    digits = "1" * 100_000
    number, other = read_number(digits), read_number(digits[:-1] + "2")
    assert number is not None and other is not None and not is_equal_number(number, other)
    groups = "1" + ",111" * 50_000
    assert read_number(groups) == read_number("1" + "111" * 50_000)
    assert last_number_in(groups + "1") == read_number("1111")
    assert last_number_in("1,1" * 50_000) is not None


@pytest.mark.parametrize("label", ["", "five", "12,34", "1/0", "nan", "--5", "3 1/2", True, None])
def test_a_label_that_is_no_number_is_refused(label: object) -> None:
    with pytest.raises(ValueError, match="label"):
        grade("last_number", "5", label)


def test_the_plugin_is_the_built_in_one() -> None:
    for response, expected in (("so 46.0", 1.0), ("46 or 47", 0.0)):
        assert asyncio.run(reward(None, Sample(prompt="", response=response, label="46"))) == expected
    with pytest.raises(ValueError, match="label"):
        asyncio.run(reward(None, Sample(prompt="", response="4", label="forty")))
