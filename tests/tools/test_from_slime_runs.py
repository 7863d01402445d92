"""tools/from_slime_runs.py: what it refuses, how it judges a run, and the stubs that examples talk to."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Command

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import from_slime_runs

    return from_slime_runs


def test_what_is_not_run_counts_as_such(tool: Any, command: Command, tmp_path: Path) -> None:
    run = partial(command, tool.main, "--slime", tmp_path)
    assert "has no folder examples" in run()[1]
    (tmp_path / "examples").mkdir()
    code, shown = run("--only", "coding-agent", "--least", "1")
    assert code == 1 and "skip  examples/coding_agent_rl/generate.py: generate\n      it needs the sandboxes" in shown
    assert shown.endswith("0 of 1 functions run two steps (0 pass, 0 fail, 1 skip)\n")
    code, shown = run("--only", "serch")
    assert code == 2 and "--only serch" in shown
    (tmp_path / "miles").mkdir()  # a checkout of miles has cases of its own
    _, shown = run("--only", "hud", "--only", "random-async")
    assert "skip  examples/experimental/hud/rollout.py: generate" in shown
    assert shown.endswith("0 of 3 functions run two steps (0 pass, 0 fail, 3 skip)\n")


def test_a_run_is_judged_by_what_it_left(tool: Any) -> None:
    case = next(one for one in tool.CASES if one.name == "search-r1")
    step = {"train/loss": 0.1, "train/num_tokens": 5.0, "train/logprob_diff_mean": 1e-6, "train/grad_norm": 0.3}
    still = step | {"train/loss": 0.0, "train/grad_norm": 0.0}

    def judged(*steps: dict[str, float], searches: int = 1) -> str:
        found = [{"response": "<information>It was 7.</information>"}]
        return tool._judge(case, tool.Outcome(list(steps), found, {"searches": searches}))

    assert judged(step, step) == judged(still, step) == ""
    assert "1 steps instead of 2" in judged(step)
    assert "no evidence: searches >= 1" in judged(step, step, searches=0)
    assert "finite loss" in judged(step, step | {"train/loss": float("nan")})
    assert "without tokens" in judged(step, step | {"train/num_tokens": 0.0})
    assert "differ by 0.5" in judged(step, step | {"train/logprob_diff_mean": 0.5})
    assert "no step had a gradient" in judged(still, still)
