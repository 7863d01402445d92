"""Run folders that somebody else prepared: opened as they are, or refused in one line; never written through."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrl.observe.run_dir import RunDir

OPENED, REFUSED = "opened", "refused"


def _link_to(name: str) -> Callable[[Path, Path], None]:
    def mutate(run: Path, outside: Path) -> None:
        path = run / name
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside if "." in name else outside.parent)

    return mutate


def _link_to_file(name: str) -> Callable[[Path, Path], None]:
    def mutate(run: Path, outside: Path) -> None:
        (run / name).rmdir()
        (run / name).symlink_to(outside)

    return mutate


def _link_to_nothing(name: str) -> Callable[[Path, Path], None]:
    return lambda run, outside: _link_to_file(name)(run, outside.parent / "nothing")


def _text(name: str, text: str) -> Callable[[Path, Path], None]:
    return lambda run, outside: (run / name).write_text(text) and None


def _fifo(name: str) -> Callable[[Path, Path], None]:
    def mutate(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return mutate


def _file_for_folder(run: Path, outside: Path) -> None:
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("no folder")


def _metrics(line: str) -> Callable[[Path, Path], None]:
    """A line, and a good one of the same attempt after it."""
    return _text("metrics.jsonl", f'{{"step": 1, "attempt": 1}}\n{line}\n{{"step": 2, "attempt": 1}}\n')


MUTATIONS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "run.lock is a link": (_link_to("run.lock"), REFUSED),
    "run.lock is a pipe": (_fifo("run.lock"), REFUSED),
    "run.lock has a pid of text": (_text("run.lock", '{"pid": "1; rm", "host": "h"}'), OPENED),
    "run.lock has a pid of 100 digits": (_text("run.lock", '{"pid": %s}' % ("9" * 100)), OPENED),
    "run.lock has a pid of -1": (_text("run.lock", '{"pid": -1}'), OPENED),
    "run.lock is nested JSON": (_text("run.lock", "[" * 100_000), OPENED),
    "config.json is a link": (_link_to("config.json"), REFUSED),
    "config.json is a pipe": (_fifo("config.json"), REFUSED),
    "config.json is no text": (lambda run, _: (run / "config.json").write_bytes(b"\xff\xfe\x00") and None, OPENED),
    "metrics.jsonl is a link": (_link_to("metrics.jsonl"), REFUSED),
    "metrics.jsonl has an attempt of text": (_metrics('{"step": 1, "attempt": "2"}'), REFUSED),
    "metrics.jsonl has a step of 5,000 digits": (_metrics('{"step": %s, "attempt": 1}' % ("9" * 5000)), REFUSED),
    "metrics.jsonl has nested JSON": (_metrics("[" * 100_000), REFUSED),
    "checkpoints is a link to a file": (_link_to_file("checkpoints"), REFUSED),
    "checkpoints is a link to nothing": (_link_to_nothing("checkpoints"), REFUSED),
    "checkpoints is a file": (_file_for_folder, REFUSED),
    "eval is a link": (_link_to("eval"), REFUSED),
    "a checkpoint is a link": (_link_to("checkpoints/step_000001"), REFUSED),
    "logs/driver.log is a link": (_link_to("logs/driver.log"), REFUSED),
    "rollouts has a file of a huge attempt": (
        lambda run, _: (run / "rollouts" / f"train_000001.a{'9' * 60}.jsonl").write_text("") and None,
        OPENED,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_run_folder_of_somebody_else(name: str, tmp_path: Path) -> None:
    """Neither a traceback nor a wait, and no file outside of the folder is changed."""
    mutate, expected = MUTATIONS[name]
    outside = tmp_path / "elsewhere" / "file"
    outside.parent.mkdir()
    outside.write_text("precious")
    run = tmp_path / "run"
    with RunDir(run) as made:
        made.write_config({"lr": 1.0})
    mutate(run, outside)
    start, message = time.monotonic(), None
    try:
        with RunDir(run, resume=True, mode=0o700) as opened:
            opened.write_config({"lr": 2.0})
    except ValueError as error:
        message = str(error)
    assert (OPENED if message is None else REFUSED) == expected
    assert message is None or ("\n" not in message and str(run) in message and len(message) < 600)
    assert time.monotonic() - start < 5
    assert outside.read_text() == "precious" and len(list(outside.parent.iterdir())) == 1


def test_a_refused_folder_can_be_opened_once_it_is_repaired(tmp_path: Path) -> None:
    """A refusal gives the lock back."""
    RunDir(tmp_path).close()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="link"):
        RunDir(tmp_path, resume=True)
    assert (tmp_path / "run.lock").read_text() == ""
    (tmp_path / "metrics.jsonl").unlink()
    RunDir(tmp_path, resume=True).close()


def test_folders_on_another_disk(tmp_path: Path) -> None:
    """A new run takes this user's links to folders, and a resume goes on with them."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("rollouts", "checkpoints", "logs", "weights"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (run / name).symlink_to(tmp_path / "disk" / name)
    with RunDir(run) as made:
        made.write_config({"lr": 1.0})
        (made.checkpoints / "file").write_text("on the disk")
    assert (tmp_path / "disk" / "checkpoints" / "file").is_file()
    RunDir(run, resume=True).close()
    (tmp_path / "disk" / "logs" / "driver.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="logs/driver.log is a link"):
        RunDir(run, resume=True)


@pytest.mark.parametrize("whose", ["the link", "the folder"])
def test_links_of_and_to_somebody_else_are_refused(whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    if os.getuid() == 0:
        os.chown(tmp_path / ("run/checkpoints" if whose == "the link" else "disk"), 65534, 65534, follow_symlinks=False)
    else:  # only the superuser can give files away
        monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ValueError, match="checkpoints is a link"):
        RunDir(tmp_path / "run")


def test_a_folder_of_the_user_keeps_its_rights(tmp_path: Path) -> None:
    """`--run-dir .` in a shared folder shuts nobody out; a run's own folder gets them again by a resume."""
    tmp_path.chmod(0o755)
    with RunDir(tmp_path, mode=0o700):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
    with RunDir(tmp_path / "run", mode=0o700) as run:
        run.write_config({"lr": 1.0})
    run.path.chmod(0o755)
    with RunDir(run.path, resume=True, mode=0o700):
        assert run.path.stat().st_mode & 0o777 == 0o700


def test_rights_of_folders_and_files(tmp_path: Path) -> None:
    """--run-dir-mode holds for the folder and all in it."""
    from fusionrl.observe.run_dir import umask_of

    before = os.umask(umask_of("700"))
    try:
        with RunDir(tmp_path / "run", mode=0o700) as run:
            config = run.write_config({"rm_url": "http://me:hunter2@host/score"})
            run.write_plan("reward by http://me:hunter2@host/score")
            rights = {path: path.stat().st_mode & 0o777 for path in [run.path, *run.path.rglob("*")]}
    finally:
        os.umask(before)
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in rights.items()), rights
    assert json.loads(config.read_text())["rm_url"] == "http://me:***@host/score"
    assert not any("hunter2" in path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert umask_of("750") == 0o027
