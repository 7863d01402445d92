"""A run that an error ends saves its trained steps first, and its resume is exact.

A reward that raises: test_console.py. An engine that dies: test_end_of_run.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run, train_steps, trained_prompts

pytestmark = pytest.mark.e2e


def test_a_reward_that_raises_while_groups_are_under_way(rl_flags: list[str], tmp_path: Path) -> None:
    """Generation runs ahead: no prompt is lost, and none is trained twice.

    Of 32 samples a step, those from 96 on are admitted after the first push, and the last step needs them.
    """
    folder = tmp_path / "run"
    flags = [*rl_flags, "--pipeline", "async-partial", "--custom-rm-path", "tests/e2e/hooks.py:fails_late"]
    flags += ["--rollout-max-response-len", "48", "--admission-lead", "2", "--sglang-max-running-requests", "2"]
    flags += ["--num-rollout", "4", "--verify-checkpoints", "--run-dir", str(folder)]
    failed = run(flags, tmp_path, code=1, FUSIONRL_TEST_SAMPLE="96").output()
    done = max(row["step"] for row in metrics_of(folder))
    assert 1 <= done < 4 and f"step_{done:06d} has all of it" in " ".join(failed.split()), failed[-3000:]
    run(["--run-dir", str(folder), "--resume"], tmp_path)
    assert [step for _, step in train_steps(folder)] == list(range(1, 5))
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * 4
