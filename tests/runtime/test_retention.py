"""What --keep-rollouts and --max-log-mb leave of a run's folder."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fusionrl.config.config import Config
from fusionrl.observe.metrics import MetricsSink, next_attempt
from fusionrl.observe.rollouts import RolloutWriter, list_rollouts
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.runtime.retention import Retention, shorten_log


def run_with(path: Path, num_steps: int, saved: int) -> None:
    """The folder of a run after some steps, of which a checkpoint has the first `saved`."""
    writer = RolloutWriter(path)
    for rollout_id in range(num_steps):
        writer.write_trained(writer.write(rollout_id, 1, [{"index": 0}]), [{"line": 0}])
        with MetricsSink(path, 1) as metrics:
            metrics.log(rollout_id + 1, {"train/loss": 1.0})
    writer.write(2, 1, [{}], kind="eval-sums")
    writer.write(1, 1, [{}], kind="failed")
    writer.write(0, 2, [{}])
    (writer.folder / "mine.jsonl").write_text("{}\n")
    if saved:
        checkpoints = Checkpoints(path / "checkpoints")
        checkpoints.publish(saved - 1, checkpoints.begin(saved - 1), {})


@pytest.mark.parametrize(
    ("saved", "flags", "kept"),
    [
        (4, {"keep_rollouts": 2}, {5, 6}),
        (3, {"keep_rollouts": 2}, {4, 5, 6}),  # a resume trains these again
        (4, {"keep_rollouts": 5}, {2, 3, 4, 5, 6}),
        (0, {"keep_rollouts": 2}, {1, 2, 3, 4, 5, 6}),
        (0, {"keep_rollouts": 2, "no_save": True}, {5, 6}),
        (4, {}, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_samples_that_stay(tmp_path: Path, saved: int, flags: dict[str, object], kept: set[int]) -> None:
    """Of every kind and attempt. Files of the user's stay, and a resume counts attempts as before."""
    run_with(tmp_path, 6, saved)
    attempt = next_attempt(tmp_path)
    Retention(Config.from_flat(flags), tmp_path).after_step(6)
    files = list_rollouts(tmp_path, all_attempts=True)
    assert {file.step for file in files if file.kind == "train"} == kept
    assert {(file.kind, file.step) for file in files if file.kind != "train"} == {
        (kind, step) for kind, step in (("eval-sums", 2), ("failed", 2)) if step in kept
    }
    assert len(list((tmp_path / "rollouts" / "trained").iterdir())) == len(kept)
    assert (tmp_path / "rollouts" / "mine.jsonl").exists()
    MetricsSink(tmp_path, attempt).log(7, {})
    assert next_attempt(tmp_path) == attempt + 1


WRITER = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(log, b"line %07d of a log\\n" % number)
    if number % 1000 == 0:
        print(number, flush=True)
"""


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    """While a process appends to it: lines are whole, and the size is bounded."""
    log, most, num_lines = tmp_path / "engine-0.log", 2**16, 30_000
    command = [sys.executable, "-c", WRITER, str(log), str(num_lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        num_cuts = sum(shorten_log(log, most) for _ in writer.stdout)
    shorten_log(log, most)
    lines = log.read_text().splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    notes = [line for line in lines if line.endswith(" bytes left out here: --max-log-mb]")]
    assert num_cuts > 3 and log.stat().st_size <= most + 200 and len(numbers) + len(notes) == len(lines)
    assert numbers[:100] == list(range(100)) and max(numbers) == num_lines - 1 and len(notes) in (1, 2)
    # What is written while a log is cut may stand before lines that are older.
    assert sum(earlier > later for earlier, later in pairwise(numbers)) <= 2
    assert not shorten_log(log, most)
