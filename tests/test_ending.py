"""The last message of a run that was stopped: what is kept, what is lost, and the command that goes on."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest

import fusionrl.runtime.run
from fusionrl import cli
from fusionrl.cli.train import debug, explain
from fusionrl.config.config import Config
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.run_dir import RunDir
from fusionrl.runtime.checkpoints import Checkpoints, end_message

Capsys, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def stopped(path: Path, saved: int, steps: list[int], attempt: int = 1, **values: object) -> str:
    """The message of a run with a checkpoint of its first `saved` steps that has recorded `steps`."""
    if saved:
        checkpoints = Checkpoints(path / "checkpoints")
        checkpoints.publish(saved - 1, checkpoints.begin(saved - 1), {})
    with MetricsSink(path, attempt) as sink:
        for step in steps:
            sink.log(step, {"train/loss": 1.0})
    return end_message(Config.from_flat(values), path, attempt)


@pytest.mark.parametrize(
    ("saved", "steps", "said"),
    [
        (3, [0, 1, 2, 3, 4, 5], " after step 5; steps 4-5 are lost: --resume continues from step_000003"),
        (3, [1, 2, 3, 4], " after step 4; step 4 is lost: --resume continues from step_000003"),
        (5, [1, 2, 3, 4, 5], " after step 5; step_000005 has all of it: --resume continues from there"),
        (0, [0, 1, 2], " after step 2; steps 1-2 are lost: --resume continues from the start"),
        (0, [], " before the end of the first step; nothing is trained yet: --resume begins at step 1"),
    ],
)
def test_what_is_kept_and_what_is_lost(tmp_path: Path, saved: int, steps: list[int], said: str) -> None:
    text, command = stopped(tmp_path, saved, steps, save_interval=3).split("\n")
    assert text == said
    assert command == f"to continue: fusionrl train --run-dir {tmp_path} --resume"


def test_steps_of_an_earlier_attempt_are_not_counted(tmp_path: Path) -> None:
    """They were trained from a checkpoint that this attempt went back to."""
    stopped(tmp_path, 3, [1, 2, 3, 4, 5])
    assert " after step 3; step_000003 has all of it" in stopped(tmp_path, 3, [], attempt=2)
    assert " after step 4; step 4 is lost" in stopped(tmp_path, 3, [3, 4], attempt=3)


def test_what_a_run_saves(tmp_path: Path) -> None:
    assert "--save-interval N saves every N steps" in stopped(tmp_path, 0, [1, 2])
    assert stopped(tmp_path, 0, [1, 2], no_save=True) == " after step 2; nothing is saved (--no-save)"
    assert stopped(tmp_path, 0, [0], mode="eval") == ""


def test_a_damaged_folder_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("?\n?\n")
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000002" / "manifest.json").write_text("?")
    assert "nothing is trained yet" in end_message(Config(), tmp_path, 1)


def test_pdb_opens_where_the_first_error_was_raised(monkeypatch: Patch, capsys: Capsys) -> None:
    """Not where it was wrapped: the user's own line."""

    def of_the_user(level: int) -> float:
        return 1 / level

    with pytest.raises(ZeroDivisionError) as cause:
        of_the_user(0)
    error = RuntimeError("--custom-rm-path mine.py:reward failed")
    error.__cause__ = cause.value
    monkeypatch.setattr("sys.stdin", io.StringIO("p 'level is', level\nq\n"))
    debug(error)
    told = capsys.readouterr()
    assert "('level is', 0)" in told.out and "of_the_user" in told.out
    assert told.err == "--pdb: ZeroDivisionError: division by zero\n"


def test_a_full_disk_is_told_with_its_cure(tmp_path: Path) -> None:
    """The kernel's own full disk: whatever is written to /dev/full fails as on one."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught, MetricsSink(tmp_path, 1) as sink:
        sink.log(1, {"train/loss": 0.5})
    code, text = explain(caught.value)
    assert code == 1 and "failed: OSError" in text and "a disk is full" in text and "--resume continues" in text
    wrapped = RuntimeError("trainer rank 0 could not write step_000002 ([Errno 28] No space left on device)")
    assert "--keep-checkpoints" in explain(wrapped)[1]
    assert "disk" not in explain(RuntimeError("something else"))[1]


@pytest.mark.parametrize("where", [(RunDir, "write_config"), (fusionrl.runtime.run, "run_training")])
def test_a_full_disk_is_named_where_it_refuses_the_log(
    where: Any, tiny_model: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
) -> None:
    """The run's first files, or its samples, fill the disk: no file takes the traceback, and the cure is printed."""

    def fail(*_: object) -> None:
        log = tmp_path / "run" / "logs" / "driver.log"
        log.unlink(missing_ok=True)
        log.symlink_to("/dev/full")
        logging.getLogger("fusionrl").warning("not even this")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*where, fail)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    command = (
        f"train --mode sft --device cpu --hf-checkpoint {tiny_model} --num-rollout 1 --rollout-batch-size 1"
        f" --prompt-data {data} --input-key messages --run-dir {tmp_path}/run"
    )
    assert cli.main(command.split()) == 1
    message = capsys.readouterr().err
    assert "failed: OSError" in message and "a disk is full" in message and "Traceback" not in message
