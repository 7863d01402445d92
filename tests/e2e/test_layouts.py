"""A whole PPO run whose trainers are divided: what they push, the engines' own log-probs and checksums confirm.

It ends when a process is killed, and its error names that one. Of others that die: a trainer and a router in
test_pipelines.py, an engine's actor in test_saved_samples.py, its server in test_end_of_run.py.
"""

import re
from pathlib import Path

import pytest

from tests.e2e.deaths import kill_and_check
from tests.e2e.launch import launch, metrics_of

pytestmark = pytest.mark.e2e


def test_divided_trainers_and_two_engines(rl_flags: list[str], tmp_path: Path) -> None:
    """PPO: the critic has a layout and devices of its own, and is trained towards the returns.

    The engines speculate: the trainers find the log-probs of the tokens that were drafted to be their own. After two
    steps a reward hangs, the watchdog names it, and the Buffer is killed. Trainers that divide experts: test_loop.py.
    """
    folder, hang = tmp_path / "run", tmp_path / "hang"
    launched = launch(
        [*rl_flags, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
        + ["--algorithm", "ppo", "--critic-num-gpus", "1", "--critic-lr", "3e-3", "--num-critic-only-steps", "1"]
        + ["--critic-tensor-model-parallel-size", "1", "--critic-pipeline-model-parallel-size", "1"]
        + ["--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-num-draft-tokens", "4"]
        + ["--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4", "--rollout-num-gpus", "2"]
        + ["--colocate", "--num-rollout", "100", "--num-steps-per-rollout", "2", "--verify-weights", "always"]
        + ["--run-dir", str(folder), "--no-save", "--stall-warn-s", "1", "--max-restarts", "0"]
        + ["--custom-rm-path", "tests/e2e/hooks.py:hangs"],
        tmp_path,
        FUSIONRL_TEST_FILE=str(hang),
    )

    def is_time() -> bool:
        if len(metrics_of(folder)) < 3:
            return False
        hang.touch()
        return re.search(r'"generate" has taken .* scored \(sample \d+ for \d+ s\)', launched.output()) is not None

    kill_and_check(launched, folder, is_time, "buffer.a1.log", "the Buffer died: its process ")
    rows = metrics_of(folder)[:3]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["sync/verify_logprob_diff"] < 1e-4
        assert row["sync/version"] == row["step"]
        assert row["sync/verify_tensors"] > 0
    for row in rows[1:]:
        assert "rollout/spec_accept_rate" in row and row.get("rollout/spec_accept_length", 1.0) >= 1.0
    assert "train/loss" not in rows.pop(1), "in the first rollout the critic alone is trained"
    assert rows[1]["critic/value_mean"] != 0 and rows[1]["critic/grad_norm"] > 0
    assert rows[1]["train/logprob_diff_mean"] < 1e-4
    assert rows[1]["train/grad_norm"] > 0
    assert rows[1]["train/skipped"] == 0
