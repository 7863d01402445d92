"""The rewards that have a namesake in slime give its scores, on a corpus of answers that slime's graders scored.

`tools/from_slime_scores.py --slime DIR` scores it again with the graders of a checkout.
"""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "from_slime_scores.py"
PAGE = ROOT / "docs" / "guides" / "rewards.md"
STUB = """
import json
async def async_rm(args, sample):
    assert args.rm_type == "f1" and sample.label == "cat"
    if sample.response == "raises":
        raise ZeroDivisionError
    return 0.25 if sample.response == "odd" else 1
"""


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


def test_the_tool_tells_a_difference_that_is_not_stated(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "checkout" / "slime" / "rollout" / "rm_hub"
    hub.mkdir(parents=True)
    (hub / "__init__.py").write_text(STUB)
    rows: list[Any] = [("cat", 1.0, {}), ("odd", 0.25, {"ours": 0.0, "why": "a reason"})]

    corpus = tmp_path / "corpus.jsonl"
    monkeypatch.setattr(sys, "argv", ["tool", "--slime", str(tmp_path / "checkout"), "--corpus", str(corpus)])
    for more, status, parts in (
        ([], 0, ["f1: the same", "f1: different, stated", "2 answers, 0 not as stated"]),
        ([("dog", 1.0, {}), ("raises", "error", {})], 1, ["slime 1.0, here 0.0; stated", "slime error, here 0.0"]),
    ):
        rows += more
        lines = [{"rm_type": "f1", "response": text, "label": "cat", "slime": s} | why for text, s, why in rows]
        corpus.write_text("\n".join(map(json.dumps, lines)))
        assert tool.main() == status
        told = capsys.readouterr().out
        assert all(part in told for part in parts), told
