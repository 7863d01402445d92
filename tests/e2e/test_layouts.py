"""Whole rl runs whose trainers are divided: what they push, the engines' own log-probs and checksums confirm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("layout", ["tp2-pp2", "ep2-dp2"])
def test_divided_trainers_and_two_engines(
    layout: str, task: Path, experts: Path, rl_flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = {
        "tp2-pp2": ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
        "ep2-dp2": ["--expert-model-parallel-size", "2", "--hf-checkpoint", str(experts)],
    }[layout]
    run(
        [*rl_flags, *flags, "--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4", "--rollout-num-gpus", "2"]
        + ["--colocate", "--num-rollout", "2", "--num-steps-per-rollout", "2", "--verify-weights", "always"]
        + ["--run-dir", str(folder), "--no-save"],
        tmp_path,
    )
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["sync/verify_logprob_diff"] < 1e-4
        assert row["sync/version"] == row["step"]
    for row in rows[1:]:
        assert row["train/logprob_diff_mean"] < 1e-4
        assert row["train/grad_norm"] > 0
        assert row["train/skipped"] == 0
