"""What a person sees while a run goes on, and after it, where there is nothing to learn."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run, show

pytestmark = pytest.mark.e2e


def test_rewards_that_are_always_0_are_said_with_a_cause(rl_flags: list[str], tmp_path: Path) -> None:
    """On the console and in the log, once in three steps; the command that the warning names shows the samples."""
    folder = tmp_path / "a run"
    flags = [*rl_flags, "--custom-rm-path", "tests/e2e/hooks.py:never", "--num-rollout", "3", "--log-samples", "2"]
    launched = run([*flags, "--rollout-max-response-len", "2", "--run-dir", str(folder)], tmp_path)
    output = launched.output()
    assert all(row["train/grad_norm"] == 0 for row in metrics_of(folder)[1:])
    for text in (output, (folder / "logs" / "driver.log").read_text()):
        warnings = re.findall(r"step (\d): this rollout teaches nothing: all 8 groups have equal rewards", text)
        assert warnings == ["1"], text[-3000:]
        assert "likely: the reward is always 0" in text
        assert re.search(r"likely: \d+% of the answers were cut off at --rollout-max-response-len 2", text)
        assert re.search(
            r'sample \d+: prompt ".*\d+\+\d+.*"; answer ".*" \(\d tokens, .*\); label "\d+"; reward 0', text
        )
    assert len(re.findall(r"^step \d: 2 samples", output, re.MULTILINE)) == 3
    command = re.search(r"look: fusionrl show (.*)", output)
    assert command is not None
    shown = show(*shlex.split(command[1]))
    assert "step 1" in shown and "groups with equal rewards: 8" in shown and "5 of 8:" in shown
    records = [json.loads(line) for line in show(folder, "--step", "1", "-n", "0", "--json").splitlines()]
    assert len(records) == 32 and all(record["advantage"] == 0 for record in records)
    total = sum(record["mismatch"] * record["num_trained"] for record in records)
    tokens = sum(record["num_trained"] for record in records)
    assert metrics_of(folder)[1]["train/logprob_diff_mean"] == pytest.approx(total / tokens, rel=1e-6)
