"""--use-fault-tolerance: engines are killed and stopped in the middle of rollouts, and the run goes on to its end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launch import Launched, launch, metrics_of

pytestmark = pytest.mark.e2e

NUM_TOKENS = 120


def _strike(launched: Launched, folder: Path, rollout_id: int, pattern: str, number: int) -> None:
    """Send the signal to the first process that matches, when the rollout is under way."""
    launched.wait_for(lambda: (folder / f"began-{rollout_id}").exists(), timeout_s=300)
    time.sleep(0.5)
    pids = launched.find(pattern)
    assert pids
    os.kill(pids[0], number)


def test_a_round_outlives_its_engines(rl_flags: list[str], tmp_path: Path) -> None:
    """Two of three rollouts lose an engine, and no sample: one is killed, one hangs. Each is back with the weights."""
    folder = tmp_path / "run"
    launched = launch(
        [*rl_flags, "--rollout-num-gpus", "2", "--num-rollout", "3", "--run-dir", str(folder), "--no-save"]
        + ["--use-fault-tolerance", "--stream-responses", "--verify-weights", "always"]
        + ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "8"]
        + ["--rollout-ignore-eos", "--rollout-max-response-len", str(NUM_TOKENS)]
        + ["--custom-generate-function-path", "tests/e2e/hooks.py:noted_generate"],
        tmp_path,
    )
    _strike(launched, folder, 1, r"fusionrl\.engines\.launch_server", signal.SIGKILL)
    _strike(launched, folder, 2, r"sglang::scheduler", signal.SIGSTOP)
    assert launched.wait(300) == 0, launched.output()[-3000:]
    launched.assert_nothing_left()

    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["sync/version"] == row["step"]
        assert row["sync/verify_logprob_diff"] < 1e-4  # of both engines, the new ones as well
    assert [row["rollout/engines_died"] for row in rows[1:]] == [0, 1, 1]
    assert [row["sync/engines_restarted"] for row in rows] == [0, 0, 1, 1]
    for row in rows[1:]:
        assert row["train/logprob_diff_mean"] < 1e-4  # tokens of two engines in one sample are exact
        assert (row["rollout/requests_retried"] > 0) == (row["rollout/engines_died"] > 0)
        assert (row["rollout/tokens_kept"] > 0) == (row["rollout/engines_died"] > 0)
    for rollout_id in range(3):
        path = folder / "rollouts" / f"train_{rollout_id:06d}.a1.jsonl"
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(samples) == 32
        for sample in samples:
            assert sample["response_length"] == len(sample["rollout_log_probs"]) == NUM_TOKENS
            assert set(sample["weight_versions"]) == {rollout_id}
    assert launched.output().count("is dead") == launched.output().count("is back") == 2
