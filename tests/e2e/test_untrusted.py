"""A whole run under a policy that writes nothing but cheats and escapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.observe.rollouts import read_rollouts
from fusionrl.rewards.code_run import REASONS
from tests.e2e.hooks import hostile_programs
from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


def test_cheats_and_escapes_earn_nothing_and_the_run_goes_on(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Every program of both catalogues once: the run comes to its end, each scores 0, each has a reason."""
    folder = tmp_path / "run"
    num_programs = len(hostile_programs())
    num_rollout, group = 2, 4
    num_prompts = -(-num_programs // (num_rollout * group))
    at = rl_flags.index("--custom-rm-path")
    flags = [*rl_flags[:at], "--rm-type", "code_all", *rl_flags[at + 2 :]]
    flags += ["--custom-generate-function-path", "tests/e2e/hooks.py:hostile_generate", "--allow-weak-sandbox"]
    flags += ["--rollout-batch-size", str(num_prompts), "--num-rollout", str(num_rollout), "--no-save"]
    run([*flags, "--run-dir", str(folder)], tmp_path, timeout_s=480.0)
    assert "sandbox    " in (folder / "plan.txt").read_text()
    rows = [row for row in metrics_of(folder) if "rollout/raw_reward" in row]
    assert [row["rollout/raw_reward"] for row in rows] == [0.0] * num_rollout
    counted = sum(row.get(f"rollout/code_failed/{reason}", 0) for row in rows for reason in REASONS)
    assert counted == num_rollout * num_prompts * group >= num_programs
    assert not any("rollout/reward_timeout" in row or "rollout/reward_crash" in row for row in rows)
    saved = list(read_rollouts(folder, "train"))
    assert {row["response"] for row in saved} == {f"```python\n{source}\n```" for source, _ in hostile_programs()}
    assert all(len(row["metadata"]["code_failures"]) == 1 for row in saved)
