"""With --use-fault-tolerance a run outlives its engines. Without, its error names who died: tests/e2e/deaths.py."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e import holds
from tests.e2e.launch import Launched, launch, metrics_of, samples_of_step
from tools.family_loops import make_model

pytestmark = pytest.mark.e2e

NUM_SAMPLES, NUM_TOKENS = 16, 100


def _strike(launched: Launched, folder: Path, rollout_id: int, number: int) -> None:
    """Send the signal to an engine that has answered in part: to its server, SIGSTOP to its scheduler."""
    scheduler = holds.wait_for_held(launched, folder, rollout_id)[0]
    os.kill(scheduler if number == signal.SIGSTOP else _server_of(scheduler), number)
    holds.let_go(folder, rollout_id)


def _server_of(scheduler: int) -> int:
    parents = psutil.Process(scheduler).parents()
    return next(parent.pid for parent in parents if "fusionrl.engines.launch_server" in " ".join(parent.cmdline()))


def test_a_round_outlives_its_engines(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Two of three rollouts lose an engine, and no sample: one is killed, one hangs. Each is back with the weights.

    The model is qwen3_5_moe, with delta nets and experts: an engine computes the states of a taken over answer again.
    """
    folder, model = tmp_path / "run", tmp_path / "model"
    make_model("qwen3_5_moe", task, model)
    with launch(
        [*rl_flags, "--rollout-num-gpus", "2", "--num-rollout", "3", "--run-dir", str(folder), "--no-save"]
        + ["--rollout-batch-size", "4", "--hf-checkpoint", str(model)]
        + ["--use-fault-tolerance", "--stream-responses", "--verify-weights", "always"]
        + ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "15"]
        + ["--rollout-ignore-eos", "--rollout-max-response-len", str(NUM_TOKENS)]
        + holds.flags(folder, rollouts=[1, 2], num_streams=NUM_SAMPLES),
        tmp_path,
    ) as launched:
        _strike(launched, folder, 1, signal.SIGKILL)
        _strike(launched, folder, 2, signal.SIGSTOP)
        assert launched.wait() == 0, launched.output()[-3000:]

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
        samples = samples_of_step(folder, rollout_id + 1)
        assert len(samples) == NUM_SAMPLES
        for sample in samples:
            assert sample["response_length"] == len(sample["rollout_log_probs"]) == NUM_TOKENS
            assert set(sample["weight_versions"]) == {rollout_id}
    assert launched.output().count("is dead") == launched.output().count("is back") == 2
