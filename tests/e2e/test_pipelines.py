"""Whole runs in which generation runs ahead: the bound holds, and a run that goes on loses and doubles no prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.deaths import kill_and_check
from tests.e2e.launch import launch, metrics_of, run

pytestmark = pytest.mark.e2e
# Pipelines whose first process is ended by a death: who dies, and how the error begins.
DEATHS = {
    "async-partial": ("buffer.a1.log", "the Buffer died: its process "),
    "async": ("trainer-1.a1.log", "trainer rank 1 died: its process "),
}


def trained_prompts(folder: Path) -> list[str]:
    """The prompt of each group that was trained, of a step that ran twice the later time."""
    files = [found for found in list_rollouts(folder) if found.kind == "train"]
    rows = [json.loads(line) for found in files for line in found.path.read_text().splitlines()]
    return [row["prompt"] for row in rows[::4]]


@pytest.mark.parametrize(
    ("pipeline", "bound", "flags"),
    [
        ("async-partial", 2, ["--update-weight-transport", "broadcast"]),
        ("async", 1, ["--max-staleness", "1", "--update-weight-transport", "disk", "--actor-num-gpus-per-node", "2"]),
        ("stream", 0, ["--update-weights-interval", "4"]),
    ],
)
def test_a_pipeline(rl_flags: list[str], tmp_path: Path, pipeline: str, bound: int, flags: list[str]) -> None:
    folder = tmp_path / "run"
    given = [*rl_flags, "--pipeline", pipeline, *flags, "--run-dir", str(folder), "--save-interval", "1"]
    given += ["--verify-checkpoints"]
    if bound:
        given += ["--use-tis"]
    if pipeline in DEATHS:
        launched = launch([*given, "--num-rollout", "8"], tmp_path)
        second = folder / "checkpoints" / "step_000002" / "manifest.json"
        kill_and_check(launched, folder, second.is_file, *DEATHS[pipeline])
    else:
        run([*given, "--num-rollout", "2"], tmp_path)  # of `stream` in the middle of a version
    run([*given, "--num-rollout", "8", "--resume"], tmp_path)
    rows = [row for row in metrics_of(folder) if "train/loss" in row]
    assert sorted({row["step"] for row in rows}) == list(range(1, 9))
    ages = [row["rollout/staleness/token_max"] for row in rows]
    interval = 4 if pipeline == "stream" else 1
    assert max(ages) <= bound * interval and (bound == 0 or max(ages) >= 1)
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * 8
    # Of a token that is not stale, the engine's log-prob is the trainer's; a step may have stale ones alone.
    gaps = [row["train/logprob_diff_max"] for row in rows if "train/logprob_diff_max" in row]
    assert gaps and max(gaps) < 1e-4
