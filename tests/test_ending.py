"""The last message of a run that was stopped: what is kept, what is lost, and the command that goes on."""

import errno
import io
import json
import logging
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import fusionrl.runtime.run
from fusionrl import cli
from fusionrl.base.wording import LOG_END
from fusionrl.cli.train import debug, explain
from fusionrl.config.config import Config
from fusionrl.config.user_code import HookError
from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.observe.run_dir import RunDir
from fusionrl.observe.spans import phase, record_to
from fusionrl.runtime.checkpoints import Checkpoints
from fusionrl.runtime.ending import Failure, end_message, full_traceback

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


def test_a_failure_is_summed_up(tmp_path: Path) -> None:
    """The first error counts: its phase and step, not those of what it led to. The file says what the console does."""
    folder = tmp_path / "a run"
    stopped(folder, 3, [1, 2, 3, 4])
    RolloutWriter(folder).write(4, 1, [])
    record_to(folder, "driver", 1)
    first, tail = RuntimeError(f"push: it died. Its log is x; {LOG_END}line 1\nline 2"), "line 1\nline 2"
    try:
        with phase("end"):
            try:
                with phase("step", step=5), phase("push"):
                    raise first
            except RuntimeError as error:
                raise RuntimeError(f"engine 0: {error}") from error
    except RuntimeError as error:
        last = error
    code, message = explain(last)
    failure = Failure.of(last, message, code, Config(), folder, 1)
    assert (failure.process, failure.phase, failure.step) == ("the driver", "push", 5)
    assert (failure.checkpoint, failure.last_samples, failure.pid) == ("step_000003", 5, os.getpid())
    assert failure.error == "failed: RuntimeError: engine 0: push: it died. Its log is x"
    assert failure.command is not None
    assert shlex.split(failure.command) == ["fusionrl", "train", "--run-dir", str(folder), "--resume"]
    assert json.loads(failure.write(folder).read_text()) == asdict(failure)
    where, saved = failure.describe().split("\n")
    assert (
        where.startswith(f"failed first: the driver (process {os.getpid()} on ") and ', in "push" of step 5, ' in where
    )
    assert saved == "saved: checkpoints/step_000003, samples up to step 5 in rollouts/"
    text = full_traceback(last)
    assert text.count(tail) == 1 and text.count("raise first") == 1
    assert Failure.of(last, message, code, Config.from_flat({"no_save": True}), folder, 1).command is None


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


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (OSError(errno.EROFS, "Read-only file system", "rollouts/x"), "a file system is read-only"),
        (RuntimeError("trainer rank 1 could not write ([Errno 30] Read-only file system)"), "findmnt -T"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -Hn 65536"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "fs.file-max"),
        (RuntimeError("http://x did not answer: ClientConnectorError([Errno 24] Too many open files)"), "ulimit -Hn"),
        (MemoryError(), "memory is full"),
        (RuntimeError("[enforce fail] can't allocate memory … Error code 12 (Cannot allocate memory)"), "free -g"),
        (
            RuntimeError("trainer rank 0 died: …\nthe end of it:\nCUDA out of memory. Tried to allocate"),
            "--max-tokens-per",
        ),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("Local disk is full"), "RAY_TMPDIR"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "fusionrl doctor"),
        (RuntimeError("engine 0 died: …\nthe end of it:\nConnection reset by peer"), ""),  # what others saw of it
        (HookError("--custom-rm-path f: ConnectionError: [Errno 111] Connection refused"), ""),  # a server of its own
        (HookError("--custom-rm-path f: OSError: [Errno 28] No space left on device"), "a disk is full"),
        (RuntimeError("something else"), ""),
    ],
)
def test_what_the_system_lacks_is_told_with_its_cure(error: Exception, cure: str) -> None:
    _, text = explain(error)
    message = text.removeprefix(f"failed: {type(error).__name__}: {error}")
    assert message.count("\n") == bool(cure) and cure in message
    assert not cure or "--resume continues from the last checkpoint" in message


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
