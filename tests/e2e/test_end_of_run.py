"""How runs end: killed engine, killed driver. Nothing is left behind, and a resume goes on exactly.

SIGTERM to the driver: test_security.py. SIGINT to it: test_exactness.py.
"""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from fusionrl.base.wording import LOG_END
from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.deaths import stop_scheduler
from tests.e2e.launch import Launched, launch, run, train_steps, trained_prompts

pytestmark = pytest.mark.e2e


def _flags(rl_flags: list[str], folder: Path, num_rollout: int) -> list[str]:
    flags = [*rl_flags, "--num-rollout", str(num_rollout), "--save-interval", "1", "--run-dir", str(folder)]
    return [*flags, "--resume", "--async-save", "--verify-checkpoints"]


def _saved(folder: Path) -> int:
    return max((int(p.parent.name.split("_")[1]) for p in folder.glob("checkpoints/step_*/manifest.json")), default=0)


@pytest.mark.xdist_group("recorded")
def test_kills_and_resumes(rl_flags: list[str], recorded: Path, tmp_path: Path) -> None:
    """One run through three processes: engine killed, driver killed, end. No step is lost or trained twice.

    Each resume ends unless weights, optimizer, RNG and data cursor have the hashes of the save.
    """
    folder = tmp_path / "run"
    record = ["--save-debug-rollout-data", str(recorded / "{rollout_id}.jsonl")]
    first = launch([*_flags(rl_flags, folder, 100), *record, "--stall-warn-s", "1"], tmp_path)
    first.wait_for(lambda: _saved(folder) >= 2)
    servers = first.find(r"fusionrl\.engines\.launch_server")
    (worker,) = first.find("^ray::PolicyWorker")
    parent = " ".join(psutil.Process(worker).parent().cmdline())
    assert servers and "fusionrl.base.nursery worker" in parent, "a fork of a branch of the tests' nursery"
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
    assert text.count(LOG_END) == 1, "the end of the log comes once"
    assert text.rstrip().splitlines()[-1].startswith("logs: "), text[-500:]
    first.assert_nothing_left()
    done = _saved(folder)
    assert done == max(step for _, step in train_steps(folder)), "what is trained is saved, though the engine is dead"
    assert f"the run ended after step {done}; step_{done:06d} has all of it" in " ".join(text.split())
    failure = json.loads((folder / "failure.a1.json").read_text())
    assert failure["process"] == "engine 0" and failure["step"] in (done, done + 1), failure
    assert failure["checkpoint"] == f"step_{done:06d}" and f"to continue: {failure['command']}\n" in text

    second = launch(_flags(rl_flags, folder, 100), tmp_path)
    second.wait_for(lambda: _saved(folder) >= done + 1)
    os.kill(second.process.pid, signal.SIGKILL)
    second.wait()
    second.assert_nothing_left()
    done = _saved(folder)

    # A late kill leaves rollout files of steps that are not saved: the last process trains these again.
    last = max(done + 1, *(file.step for file in list_rollouts(folder, kind="train")))
    run(_flags(rl_flags, folder, last), tmp_path)
    assert _saved(folder) == last

    # Per step the newest attempt counts; they must be the steps 1..n without a gap.
    newest = {step: attempt for attempt, step in sorted(train_steps(folder))}
    assert sorted(newest) == list(range(1, last + 1))
    assert newest[done + 1] == newest[last] == 3 and newest[1] == 1
    # The data cursor went on: no prompt was drawn twice over the whole run (one epoch is longer than the run).
    seen = trained_prompts(folder)
    assert len(seen) == len(set(seen)) == 8 * last


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.cold), (signal.SIGTERM, 143)]
)
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
