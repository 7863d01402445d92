"""`fusionrl train --supervise`: what is started again, and how. Whole runs: tests/e2e/test_exactness.py."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusionrl import cli
from fusionrl.cli import supervise
from fusionrl.runtime import restarts
from tests.own_process import wait_until

# Notes its arguments and ends as `codes` says, the first time like the first of them; "wait": it waits for SIGTERM.
CHILD = """
import json, os, pathlib, signal, sys, time
folder, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
number = len(list(folder.glob("*.start")))
run = pathlib.Path(arguments[arguments.index("--run-dir") + 1])
run.mkdir(exist_ok=True)
(run / "config.json").touch()
code = json.loads((folder / "codes").read_text())[number]
if code == "saves":
    (run / "checkpoints" / f"step_{number}").mkdir(parents=True)
elif code == 1:  # it dies while it writes one
    (run / "checkpoints" / f".writing_step_{number}").mkdir(parents=True)
if code == "saves":
    code = 1
if code == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(folder / f"{number}.start").write_text(json.dumps(arguments + [os.getpid()]))
time.sleep(60) if code == "wait" else os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(supervise, "_COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    return tmp_path


def starts(folder: Path) -> list[list[str]]:
    """Arguments of each start."""
    return [
        json.loads((folder / f"{number}.start").read_text())[:-1] for number in range(len(list(folder.glob("*.start"))))
    ]


@pytest.mark.parametrize(
    ("codes", "code", "num_starts"),
    [
        *(([0], 0, 1), ([1, -9, 0], 0, 3), ([-9, 2], 2, 2), ([1, 1, 1, 0], 1, 3), ([-9, -9, -9, 0], 137, 3)),
        *(([2], 2, 1), ([130], 130, 1), ([143], 143, 1)),
    ],
)
def test_what_is_started_again(
    codes: list[int], code: int, num_starts: int, child: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two restarts are allowed: not after a mistake, Ctrl-C or SIGTERM."""
    (child / "codes").write_text(json.dumps(codes))
    argv = ["--run-dir", str(child / "run"), "--max-restarts", "2", "--lr", "1e-3"]
    assert cli.main(["train", *argv[:2], "--supervise", *argv[2:]]) == code
    found = starts(child)
    assert found == [argv, *[[*argv, "--resume"]] * (num_starts - 1)]
    assert caplog.text.count("starting the driver again") == num_starts - 1


@pytest.mark.parametrize("record", [["--replay-schedule", "runs/first"], ["--replay-schedule=runs/first"]])
def test_a_record_is_for_the_first_start(child: Path, record: list[str]) -> None:
    """A resume refuses it."""
    (child / "codes").write_text("[1, 0]")
    argv = ["--run-dir", str(child / "run")]
    assert cli.main(["train", "--supervise", *record, *argv]) == 0
    assert starts(child) == [[*record, *argv], [*argv, "--resume"]]


def test_failures_without_progress_end_though_they_take_hours(child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_AN_HOUR_S", 0.0)
    (child / "codes").write_text('[1, 1, "saves", 1, "saves", 1, 1, 1, 0]')
    assert cli.main(["train", "--supervise", "--run-dir", str(child / "run"), "--max-restarts", "2"]) == 1
    assert len(starts(child)) == 8


def test_a_run_without_a_folder_gets_one_name(child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(child)
    (child / "runs").mkdir()
    (child / "codes").write_text("[1, 0]")
    assert cli.main(["train", "--supervise", "--name", "mine"]) == 0
    first, second = starts(child)
    assert first[-1].startswith("runs/mine-") and second == [*first, "--resume"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_to_the_supervisor_reach_the_run(
    child: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also SIGINT, if no terminal sends it to both. Nothing is started again."""
    monkeypatch.setattr(supervise, "_is_in_foreground", lambda: False)
    (child / "codes").write_text('["wait"]')

    def stop() -> None:
        wait_until((child / "0.start").is_file)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    assert cli.main(["train", "--supervise", "--run-dir", str(child / "run")]) == code
    assert len(starts(child)) == 1


def test_a_supervisor_that_is_killed_ends_the_run(child: Path) -> None:
    (child / "codes").write_text('["wait"]')
    program = "import sys; from fusionrl.cli import supervise; supervise._COMMAND = sys.argv[1:5]; "
    program += "supervise.supervise(sys.argv[5:])"
    command = [sys.executable, "-c", program, *supervise._COMMAND, "--supervise", "--run-dir", str(child / "run")]
    with subprocess.Popen(command) as supervisor:
        wait_until((child / "0.start").is_file)
        pid = json.loads((child / "0.start").read_text())[-1]
        supervisor.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())
