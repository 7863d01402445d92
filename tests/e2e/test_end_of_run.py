"""How runs end: killed engine, killed driver, SIGTERM. Nothing is left behind, and a resume goes on exactly."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.deaths import stop_scheduler
from tests.e2e.launch import Launched, launch, run, train_steps

pytestmark = pytest.mark.e2e


def _flags(rl_flags: list[str], folder: Path, num_rollout: int) -> list[str]:
    return [
        *rl_flags,
        "--num-rollout",
        str(num_rollout),
        "--save-interval",
        "1",
        "--run-dir",
        str(folder),
        "--resume",
        "--async-save",
        "--verify-checkpoints",
    ]


def _saved(folder: Path) -> int:
    return max((int(p.parent.name.split("_")[1]) for p in folder.glob("checkpoints/step_*/manifest.json")), default=0)


def _prompts(folder: Path, rollout_id: int) -> tuple[int, list[str]]:
    """(attempt, prompts) of the newest file of a rollout."""
    path = max((folder / "rollouts").glob(f"step_{rollout_id + 1:06d}.train.a*.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return int(path.stem.rsplit(".a", 1)[1]), [row["prompt"] for row in rows]


@pytest.mark.xdist_group("recorded")
def test_kills_and_resumes(rl_flags: list[str], recorded: Path, tmp_path: Path) -> None:
    """One run through four processes: engine killed, driver killed, SIGTERM, end. No step is lost or trained twice.

    Each resume ends unless weights, optimizer, RNG and data cursor have the hashes of the save.
    """
    folder = tmp_path / "run"

    record = ["--save-debug-rollout-data", str(recorded / "{rollout_id}.jsonl")]
    first = launch([*_flags(rl_flags, folder, 100), *record, "--stall-warn-s", "1"], tmp_path)
    first.wait_for(lambda: _saved(folder) >= 2)
    servers = first.find(r"fusionrl\.engines\.launch_server")
    assert servers and first.find(r"fusionrl\.base\.nursery worker"), "its processes are forks of the tests' nursery"
    stop_scheduler(first, servers[0])
    first.wait_for(lambda: "engine-0 is stopped by a signal (pid " in first.output())
    line = next(line for line in first.output().splitlines() if "engine-0 is stopped" in line)
    assert re.search(
        r'"(generate|push)" has taken .* waits for .*; engine 0: \d+ running, .*0 tok/s; stacks in ', line
    ), line
    os.kill(servers[0], signal.SIGKILL)
    assert first.wait() == 1
    text = first.output()
    assert "engine 0" in text and "engine-0.log" in text
    assert text.rstrip().splitlines()[-1].startswith("logs: "), text[-500:]
    first.assert_nothing_left()
    done = _saved(folder)
    assert done == max(step for _, step in train_steps(folder)), "what is trained is saved, though the engine is dead"
    assert f"the run ended after step {done}; step_{done:06d} has all of it" in " ".join(text.split())

    second = launch(_flags(rl_flags, folder, 100), tmp_path)
    second.wait_for(lambda: _saved(folder) >= done + 2)
    os.kill(second.process.pid, signal.SIGKILL)
    second.wait()
    second.assert_nothing_left()
    done = _saved(folder)

    third = launch(_flags(rl_flags, folder, 100), tmp_path)
    third.wait_for(lambda: _saved(folder) >= done + 1)
    os.kill(third.process.pid, signal.SIGTERM)
    assert third.wait() == 143
    third.assert_nothing_left()
    done = _saved(folder)

    run(_flags(rl_flags, folder, done + 1), tmp_path)
    assert _saved(folder) == done + 1

    # Per step the newest attempt counts; they must be the steps 1..n without a gap.
    newest = {step: attempt for attempt, step in sorted(train_steps(folder))}
    assert sorted(newest) == list(range(1, done + 2))
    assert newest[done + 1] == 4 and newest[1] == 1
    # The data cursor went on: no prompt was drawn twice over the whole run (one epoch is longer than the run).
    seen: list[str] = []
    for rollout_id in range(done + 1):
        _, prompts = _prompts(folder, rollout_id)
        seen += prompts[::4]
    assert len(seen) == len(set(seen)) == 8 * (done + 1)


@pytest.mark.cold
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_whole_group_leaves_nothing(
    rl_flags: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """While everything starts; as a terminal, `timeout` or a scheduler sends it."""
    launched: Launched = launch(
        [*rl_flags, "--num-rollout", "1", "--run-dir", str(tmp_path / "run"), "--no-save"], tmp_path
    )
    launched.wait_for(lambda: "starting 1 engine" in launched.output())
    launched.wait_for(lambda: bool(launched.find(r"fusionrl\.engines\.launch_server")))
    os.killpg(launched.process.pid, number)
    assert launched.wait() == code, launched.output()[-2000:]
    assert "GCS" not in launched.output()
    launched.assert_nothing_left()
