"""Resumes with other flags, and runs that are stopped: what the metrics and the last message say."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.launch import launch, metrics_of, run

pytestmark = pytest.mark.e2e


@pytest.fixture
def flags(task: Path, tmp_path: Path) -> list[str]:
    """A supervised run, which needs no engine."""
    return [
        *("--mode", "sft", "--device", "cpu", "--hf-checkpoint", str(task / "model"), "--input-key", "messages"),
        *("--prompt-data", str(task / "sft.jsonl"), "--rollout-batch-size", "8"),
        *("--verify-checkpoints", "--run-dir", str(tmp_path / "run")),
    ]


def rates(folder: Path) -> dict[tuple[int, int], float]:
    """(attempt, step) → learning rate."""
    return {(row["attempt"], row["step"]): row["train/lr"] for row in metrics_of(folder) if "train/lr" in row}


def test_runs_that_are_stopped_and_resumed_with_other_flags(flags: list[str], tmp_path: Path) -> None:
    """Ctrl-C loses the steps after the newest checkpoint, SIGTERM saves first.

    The flags of a resume decide the learning rate: a decay that is made longer goes on, and another --lr is the one
    that is trained with.
    """
    folder = tmp_path / "run"
    decay = ["--lr", "6e-3", "--lr-decay-style", "linear", "--num-rollout", "100000", "--save-interval", "1000"]
    first = launch([*flags, *decay], tmp_path)
    first.wait_for(lambda: len(rates(folder)) >= 3)
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130
    text = " ".join(first.output().split())
    assert re.search(r"interrupted after step (\d+); steps 1-\1 are lost: --resume continues from the start", text), (
        text
    )
    assert f"to continue: fusionrl train --run-dir {folder} --resume" in text

    short = ["--run-dir", str(folder), "--resume"]
    run([*short, "--num-rollout", "3"], tmp_path)
    longer = run([*short, "--num-rollout", "6"], tmp_path)
    assert "--resume: --num-rollout 3 -> 6" in longer.output()
    assert "linear decay of the learning rate ends at optimizer step 6" in longer.output().replace("\n", " ")

    last = launch([*short, "--num-rollout", "100000", "--lr", "1e-2", "--lr-decay-style", "constant"], tmp_path)
    last.wait_for(lambda: any(attempt == 4 for attempt, _ in rates(folder)))
    os.kill(last.process.pid, signal.SIGTERM)
    assert last.wait() == 143
    text = " ".join(last.output().split())
    message = re.search(r"terminated by SIGTERM after step (\d+); step_0*(\d+) has all of it", text)
    assert message is not None and message[1] == message[2], text
    assert (folder / "checkpoints" / f"step_{int(message[1]):06d}" / "manifest.json").is_file()

    found = rates(folder)
    assert [found[2, step] for step in (1, 2, 3)] == pytest.approx([6e-3, 4e-3, 2e-3])
    assert [found[3, step] for step in (4, 5, 6)] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert found[4, 7] == pytest.approx(1e-2)
