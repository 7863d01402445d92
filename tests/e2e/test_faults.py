"""With --use-fault-tolerance a run outlives its engines. Without, its error names who died: tests/e2e/deaths.py."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import Launched, launch, metrics_of

pytestmark = pytest.mark.e2e

NUM_TOKENS = 300


def _num_decodes(folder: Path, index: int) -> int:
    """Lines of an engine's log that tell of decoding, one for 40 steps."""
    return (folder / "logs" / f"engine-{index}.log").read_text(errors="replace").count("Decode batch")


def _strike(launched: Launched, folder: Path, rollout_id: int, number: int) -> None:
    """Send the signal to an engine that has answered in part in the rollout: to its server, SIGSTOP to its scheduler.

    The log's first new line may come after a single step, whose tokens are still under way; the second comes 40 later.
    The processes are looked up before, as an answer takes little more than a second.
    """
    launched.wait_for(lambda: (folder / f"began-{rollout_id}").exists(), timeout_s=300)
    before = [_num_decodes(folder, index) for index in range(2)]
    victims = [_victim(launched, index, number) for index in range(2)]
    launched.wait_for(lambda: any(_num_decodes(folder, i) > before[i] + 1 for i in range(2)))
    os.kill(next(victims[i] for i in range(2) if _num_decodes(folder, i) > before[i] + 1), number)


def _victim(launched: Launched, index: int, number: int) -> int:
    (server,) = launched.find(rf"^\S+ -m fusionrl\.engines\.launch_server .*--random-seed {42 + index} ")
    if number != signal.SIGSTOP:
        return server
    children = psutil.Process(server).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in "".join(child.cmdline()))


def test_a_round_outlives_its_engines(rl_flags: list[str], tmp_path: Path) -> None:
    """Two of three rollouts lose an engine, and no sample: one is killed, one hangs. Each is back with the weights."""
    folder = tmp_path / "run"
    launched = launch(
        [*rl_flags, "--rollout-num-gpus", "2", "--num-rollout", "3", "--run-dir", str(folder), "--no-save"]
        + ["--rollout-batch-size", "4"]
        + ["--use-fault-tolerance", "--stream-responses", "--verify-weights", "always"]
        + ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "15"]
        + ["--rollout-ignore-eos", "--rollout-max-response-len", str(NUM_TOKENS)]
        + ["--custom-generate-function-path", "tests/e2e/hooks.py:noted_generate"],
        tmp_path,
    )
    try:
        _strike(launched, folder, 1, signal.SIGKILL)
        _strike(launched, folder, 2, signal.SIGSTOP)
        assert launched.wait(300) == 0, launched.output()[-3000:]
    finally:
        for pid in launched.living() if launched.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
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
        path = folder / "rollouts" / f"step_{rollout_id + 1:06d}.train.a1.jsonl"
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(samples) == 16
        for sample in samples:
            assert sample["response_length"] == len(sample["rollout_log_probs"]) == NUM_TOKENS
            assert set(sample["weight_versions"]) == {rollout_id}
    assert launched.output().count("is dead") == launched.output().count("is back") == 2
