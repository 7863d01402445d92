"""Run folders that somebody else prepared: opened as they are, or refused in one line; never written through."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrl.observe.run_dir import RunDir
from tests.clock import here_s

OPENED, REFUSED = "opened", "refused"
Mutate = Callable[[Path, Path], None]  # (path within the run's folder, file outside of it)


def _link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _pipe(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _file(path: Path, outside: Path) -> None:
    path.rmdir()
    path.write_text("no folder")


def _text(text: str | bytes) -> Mutate:
    return lambda path, outside: path.write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def _metrics(line: str) -> Mutate:
    """A line, and a good one of the same attempt after it."""
    return _text(f'{{"step": 1, "attempt": 1}}\n{line}\n{{"step": 2, "attempt": 1}}\n')


MUTATIONS: list[tuple[str, str, Mutate, str]] = [
    *((name, "is a link", _link, REFUSED) for name in ("run.lock", "config.json", "metrics.jsonl", "logs/driver.log")),
    *((name, "is a pipe", _pipe, REFUSED) for name in ("run.lock", "config.json")),
    ("run.lock", "has a pid of text", _text('{"pid": "1; rm", "host": "h"}'), OPENED),
    ("run.lock", "has a pid of 100 digits", _text('{"pid": %s}' % ("9" * 100)), OPENED),
    ("run.lock", "has a pid of -1", _text('{"pid": -1}'), OPENED),
    ("run.lock", "is nested JSON", _text("[" * 100_000), OPENED),
    ("config.json", "is no text", _text(b"\xff\xfe\x00"), OPENED),
    ("metrics.jsonl", "has an attempt of text", _metrics('{"step": 1, "attempt": "2"}'), REFUSED),
    ("metrics.jsonl", "has a step of 5,000 digits", _metrics('{"step": %s, "attempt": 1}' % ("9" * 5000)), REFUSED),
    ("metrics.jsonl", "has nested JSON", _metrics("[" * 100_000), REFUSED),
    ("checkpoints", "is a link to a file", _link, REFUSED),
    ("checkpoints", "is a link to nothing", lambda path, outside: _link(path, outside.parent / "nothing"), REFUSED),
    ("checkpoints", "is a file", _file, REFUSED),
    *((name, "is a link to a folder", lambda path, outside: _link(path, outside.parent), REFUSED)
      for name in ("eval", "checkpoints/step_000001")),
    (f"rollouts/train_000001.a{'9' * 60}.jsonl", "has a huge attempt", _text(""), OPENED),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "mutate", "expected"), MUTATIONS)
def test_a_run_folder_of_somebody_else(name: str, what: str, mutate: Mutate, expected: str, tmp_path: Path) -> None:
    """Neither a traceback nor a wait, and no file outside of the folder is changed."""
    outside = tmp_path / "elsewhere" / "file"
    outside.parent.mkdir()
    outside.write_text("precious")
    run = tmp_path / "run"
    with RunDir(run) as made:
        made.write_config({"lr": 1.0})
    mutate(run / name, outside)
    start, message = time.monotonic(), None
    try:
        with RunDir(run, resume=True, mode=0o700) as opened:
            opened.write_config({"lr": 2.0})
    except ValueError as error:
        message = str(error)
    assert (OPENED if message is None else REFUSED) == expected
    assert message is None or name == "run.lock" or (run / "run.lock").read_text() == "", "it gives the lock back"
    assert message is None or ("\n" not in message and str(run) in message and len(message) < 600)
    assert time.monotonic() - start < here_s(5)
    assert outside.read_text() == "precious" and len(list(outside.parent.iterdir())) == 1


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
