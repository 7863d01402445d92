"""What a run saves of the samples of partial rollouts: the mask, log-prob and version that a token was sampled by.

The learning rate is 0, so that one model of transformers can score what all versions of the weights sampled. Samples
of several turns: test_scorers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deaths import kill_and_check
from tests.e2e.launch import launch, metrics_of
from tests.e2e.samples import check, saved_samples

pytestmark = pytest.mark.e2e


def test_partial_rollouts(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*rl_flags, "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--over-sampling-batch-size", "16"]
    # Few at a time, and long enough that answers end when they do: some are always under way when a rollout ends.
    flags += ["--rollout-max-response-len", "128", "--sglang-max-running-requests", "16"]
    flags += ["--num-rollout", "100", "--lr", "0", "--no-save"]
    launched = launch([*flags, "--run-dir", str(folder)], tmp_path)
    # The run has shown all it can after four rollouts; a death of an engine's actor ends it.
    died = ("engine-actor-0.a1.log", "engine 0 died: its process ")
    kill_and_check(launched, folder, lambda: len(metrics_of(folder)) > 4, *died)
    metrics = [row for row in metrics_of(folder) if row["step"] <= 4]
    rows = [row for row in saved_samples(folder) if row["rollout"] < 4]
    assert len(rows) == 4 * 8 * 4
    assert sum(row["rollout/partial_samples"] for row in metrics if "rollout/partial_samples" in row) > 0
    check(rows, task / "model")
    mixed = [row for row in rows if len(set(row["weight_versions"])) > 1]
    assert mixed
    for row in rows:  # only what this rollout sampled is trained on; of a sibling finished in an earlier one nothing
        assert row["loss_mask"] == [int(version == row["rollout"]) for version in row["weight_versions"]]
    # Where the first rewards are slow, whole groups wait for the next rollout, which then may have nothing to train on.
    trained = {
        row["step"]: row["rollout/staleness/token_max"] for row in metrics if "rollout/staleness/token_max" in row
    }
    assert len(trained) >= 3 and set(trained.values()) == {0}
    assert set(trained) == {row["rollout"] + 1 for row in rows if any(row["loss_mask"])}
