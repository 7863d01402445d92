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
    """tp2-pp2 is PPO: its critic has a layout and devices of its own, and is trained towards the returns."""
    folder = tmp_path / "run"
    flags = {
        "tp2-pp2": ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
        + ["--algorithm", "ppo", "--critic-num-gpus", "1", "--critic-lr", "3e-3", "--num-critic-only-steps", "1"]
        + ["--critic-tensor-model-parallel-size", "1", "--critic-pipeline-model-parallel-size", "1"],
        "ep2-dp2": ["--expert-model-parallel-size", "2", "--hf-checkpoint", str(experts)]
        + ["--pause-generation-mode", "in_place"],
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
        assert row["sync/verify_tensors"] > 0
    # Requests that keep their keys and values over a push would leave them in a prefix cache.
    server_log = next(path for path in (folder / "logs").glob("engine-0*.log") if "actor" not in path.name).read_text()
    assert f"'disable_radix_cache': {layout == 'ep2-dp2'}" in server_log
    if layout == "tp2-pp2":
        assert "train/loss" not in rows.pop(1), "in the first rollout the critic alone is trained"
        assert rows[1]["critic/value_mean"] != 0 and rows[1]["critic/grad_norm"] > 0
    for row in rows[1:]:
        assert row["train/logprob_diff_mean"] < 1e-4
        assert row["train/grad_norm"] > 0
        assert row["train/skipped"] == 0
