"""The run's folder: one live run at a time, a dead one's place taken over, nothing overwritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.observe.metrics import MetricsSink
from fusionrl.observe.run_dir import LOCK_FILE, RunDir, is_running


def _holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until it is killed."""
    script = (
        "import sys, time; from fusionrl.observe.run_dir import RunDir\n"
        "run = RunDir(sys.argv[1]); run.write_config({'lr': 1}); print('held', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_new_run_has_its_folders_and_files(tmp_path: Path) -> None:
    with RunDir(tmp_path / "runs" / "a") as run:
        assert run.attempt == 1 and all(folder.is_dir() for folder in (run.rollouts, run.checkpoints, run.logs))
        config = run.write_config({"lr": 1e-6, "out": Path("x")})
        assert config == tmp_path / "runs" / "a" / "config.json"
        assert json.loads(config.read_text()) == {"lr": 1e-6, "out": "x"}
        assert run.write_plan("one GPU").read_text() == "one GPU\n"


def test_a_folder_with_a_run_wants_resume_or_another(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    with RunDir(tmp_path) as run:
        assert run.attempt == 1, "a start that wrote nothing is no run"
        run.write_config({})
    with pytest.raises(ValueError, match="--resume"):
        RunDir(tmp_path)
    RunDir(tmp_path, resume=True).close()


def test_a_resume_adds_a_config_only_if_it_differs(tmp_path: Path) -> None:
    names = []
    for lr in (1, 1, 2, 2, 1):
        with RunDir(tmp_path, resume=True) as run:
            names.append((run.attempt, run.write_config({"lr": lr}).name))
            with MetricsSink(tmp_path, run.attempt) as sink:
                sink.log(0, {})
    files = ["config.json", "config.json", "config.a3.json", "config.a3.json", "config.a5.json"]
    assert names == list(enumerate(files, start=1))
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1}


def test_a_live_run_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        with pytest.raises(ValueError, match=f"live process {process.pid}"):
            RunDir(tmp_path, resume=True)
        process.kill()
        # Not waited for yet, so the holder is a zombie here, as under a launcher that reaps late.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with RunDir(tmp_path, resume=True) as run:
            assert run.attempt == 2


def test_the_same_process_cannot_hold_it_twice_and_a_refusal_releases_nothing(tmp_path: Path) -> None:
    with RunDir(tmp_path):
        for _ in range(2):
            with pytest.raises(ValueError, match="in use"):
                RunDir(tmp_path, resume=True)


def test_whom_a_lock_names(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    assert not is_running(tmp_path)
    with RunDir(tmp_path):
        assert is_running(tmp_path)
        holder = json.loads(lock.read_text())
    assert not is_running(tmp_path)
    for text in (json.dumps({**holder, "started": "another-boot/1"}), '{"pid": 12'):  # a recycled pid; half a record
        lock.write_text(text)
        assert not is_running(tmp_path)
        RunDir(tmp_path).close()
    lock.write_text(json.dumps({"pid": 1, "started": "x", "host": "elsewhere"}))
    with pytest.raises(ValueError, match=r"host elsewhere.*delete"):
        RunDir(tmp_path)
    assert is_running(tmp_path), "a machine that cannot be asked"
