"""docs/guides/algorithms.md: each --algorithm is the flags that the page has for it, from its paper."""

import re
from pathlib import Path

import pytest

from fusionrl.algorithms.estimators import PRESETS
from fusionrl.config.parser import parse_args

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "algorithms.md").read_text(encoding="utf-8")
FLAGS = dict(re.findall(r"`--algorithm (\w+)` = `([^`]+)`", PAGE))
COMMON = ["--n-samples-per-prompt", "4", "--rollout-max-response-len", "100"]


def test_each_algorithm_is_on_the_page() -> None:
    assert set(FLAGS) == set(PRESETS)


@pytest.mark.parametrize("name", FLAGS)
def test_an_algorithm_is_what_its_page_says(name: str) -> None:
    words = FLAGS[name].split()
    if words[-1] == "--overlong-buffer-len":
        words.append("20")  # a fifth of the longest response
    by_name, by_flags = (vars(parse_args([*flags, *COMMON]).to_args()) for flags in (["--algorithm", name], words))
    assert by_name | {"algorithm": None} == by_flags | {"algorithm": None}
