"""The rewards that have a namesake in slime give its scores, on a corpus of answers that slime's graders scored.

`tools/from_slime_scores.py --slime DIR` scores it again with the graders of a checkout.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "from_slime_scores.py"
PAGE = ROOT / "docs" / "guides" / "rewards.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_slime_scores", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_answer_has_its_score(tool: ModuleType) -> None:
    pytest.importorskip("math_verify")
    cases = tool.read_corpus()
    for case in cases:
        assert tool.our_score(case) == case.get("ours", case["slime"]), case
    counts = Counter(case["rm_type"] for case in cases)
    assert len(cases) >= 200 and min(counts[name] for name in ("math", "deepscaler", "dapo", "gpqa", "f1")) >= 30
    both = {(case["rm_type"], json.dumps(case["slime"])) for case in cases}
    assert {("math", "1.0"), ("math", "0.0"), ("gpqa", "1.0"), ("gpqa", "0.0"), ("f1", "1.0"), ("f1", "0.0")} <= both


def test_every_difference_is_on_the_page(tool: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("These scores differ:")[2].partition("slime's `ifbench`")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    stated = {(name.strip(" `"), row[2].partition(":")[0].strip()) for row in rows for name in row[1].split(",")}
    cases = [case for case in tool.read_corpus() if "ours" in case]
    assert all(case["ours"] != case["slime"] for case in cases)
    assert {(case["rm_type"].removeprefix("boxed_"), case["why"]) for case in cases} == stated
    assert all(len(row[5].strip()) > 20 for row in rows)
