"""tools/from_slime_runs.py: what it refuses, how it judges a run, and the stubs that examples talk to."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import from_slime_runs

    return from_slime_runs


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "from_slime_runs.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_not_run_counts_as_such(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    done = run("--slime", tmp_path, "--only", "geo3k", "--only", "coding-agent", "--least", "1")
    assert done.returncode == 1, done.stderr
    assert "skip  examples/geo3k_vlm_multi_turn/rollout.py: generate\n      it needs a vision model" in done.stdout
    assert done.stdout.endswith("0 of 2 functions run two steps (0 pass, 0 fail, 2 skip)\n")


def test_a_checkout_of_miles_has_cases_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "miles").mkdir()
    done = run("--slime", tmp_path, "--only", "hud", "--only", "random-async")
    assert "skip  examples/experimental/hud/rollout.py: generate" in done.stdout, done.stderr
    assert done.stdout.endswith("0 of 3 functions run two steps (0 pass, 0 fail, 3 skip)\n")


def test_no_function_is_counted_twice(tool: Any) -> None:
    for cases in (tool.CASES, tool.MILES_CASES):
        functions = [function for case in cases for function in case.functions]
        assert len(functions) == len(set(functions))


def test_mistakes_of_the_user(tmp_path: Path) -> None:
    assert "has no folder examples" in run("--slime", tmp_path).stderr
    (tmp_path / "examples").mkdir()
    assert "--only serch" in run("--slime", tmp_path, "--only", "serch").stderr


def test_a_run_is_judged_by_what_it_left(tool: Any) -> None:
    case = next(one for one in tool.CASES if one.name == "search-r1")
    step = {"train/loss": 0.1, "train/num_tokens": 5.0, "train/logprob_diff_mean": 1e-6, "train/grad_norm": 0.3}
    found = [{"response": "<information>It was 7.</information>"}]
    good = tool.Outcome([step, step], found, {"searches": 1})
    assert tool._judge(case, good) == ""
    assert "1 steps instead of 2" in tool._judge(case, tool.Outcome([step], found, {"searches": 1}))
    assert "no evidence: searches >= 1" in tool._judge(case, tool.Outcome([step, step], found, {"searches": 0}))
    for changes, said in (
        ({"train/loss": float("nan")}, "finite loss"),
        ({"train/num_tokens": 0.0}, "without tokens"),
        ({"train/logprob_diff_mean": 0.5}, "differ by 0.5"),
    ):
        assert said in tool._judge(case, tool.Outcome([step, step | changes], found, {"searches": 1}))
    still = step | {"train/loss": 0.0, "train/grad_norm": 0.0}
    assert tool._judge(case, tool.Outcome([still, step], found, {"searches": 1})) == ""
    assert "no step had a gradient" in tool._judge(case, tool.Outcome([still, still], found, {"searches": 1}))


def test_the_stubs_answer_as_the_servers_do(tool: Any) -> None:
    import from_slime_stubs as stubs

    server = stubs.StubServer("/generate", stubs.teacher_answer)
    body = json.dumps({"input_ids": [5, 6, 7]}).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url, body)) as answer:
        scored = json.loads(answer.read())["meta_info"]["input_token_logprobs"]
    server.close()
    assert [entry[1] for entry in scored] == [5, 6, 7] and scored[0][0] is None and scored[1][0] < 0
    assert server.num_requests == 1
    assert len(stubs.search_answer({"queries": ["a", "b"]})["result"]) == 2
