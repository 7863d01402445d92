"""Checkpoints: published whole or not at all, whatever happens while one is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionrl.runtime.checkpoints import Checkpoint, Checkpoints


def write(path: Path) -> None:
    (path / "weights").write_text("whole")


def publish(
    checkpoints: Checkpoints, rollout_id: int, write: Callable[[Path], None], facts: dict[str, Any]
) -> Checkpoint:
    folder = checkpoints.begin(rollout_id)
    with checkpoints.discarding(folder):
        write(folder)
        return checkpoints.publish(rollout_id, folder, facts)


def test_the_newest_one_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    for rollout_id in (0, 9, 1_999_999, 3):
        made = publish(checkpoints, rollout_id, write, {"mode": "rl"})
        assert (made.path / "weights").read_text() == "whole"
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.rollout_id == 1_999_999
    assert latest.path.name == "step_2000000"
    manifest = json.loads((latest.path / "manifest.json").read_text())
    assert manifest["mode"] == "rl"
    assert manifest["rollout_id"] == 1_999_999


def test_old_ones_are_deleted_but_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for rollout_id, accuracy in enumerate([0.1, 0.7, 0.7, None, "high", 0.2]):
        metrics = {} if accuracy is None else {"eval/held-out/accuracy": accuracy}
        publish(checkpoints, rollout_id, write, {"metrics": metrics})
    (tmp_path / "notes").mkdir()
    checkpoints.prune(2, "eval/held-out/accuracy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000003", "step_000005", "step_000006"]
    checkpoints.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000005", "step_000006"]
    assert checkpoints.prune(3) == []
    checkpoints.prune(1, "no/such/metric")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000006"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_one_before(tmp_path: Path, error: type[BaseException]) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = publish(checkpoints, 0, write, {})

    def breaks(path: Path) -> None:
        write(path)
        raise error("the disk is full")

    with pytest.raises(error):
        publish(checkpoints, 1, breaks, {})
    assert checkpoints.latest() == first
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    # The same step fails when it is saved again: the published one stays.
    with pytest.raises(error):
        publish(checkpoints, 0, breaks, {})
    assert checkpoints.latest() == first
    assert (first.path / "weights").read_text() == "whole"


def test_a_kill_in_the_middle_of_a_write_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = publish(checkpoints, 0, write, {})
    (checkpoints.begin(1) / "weights").write_text("half")
    assert checkpoints.latest() == first
    second = publish(checkpoints, 2, write, {})  # what the killed one left is in nobody's way, and goes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003"]
    assert checkpoints.latest() == second


def test_folders_that_were_never_published_do_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    first = publish(checkpoints, 0, write, {})
    for name in ("step_000005", ".writing_step_000006", "step_last", "step_7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    for name in ("step_last", "step_7", ".writing_step_000006"):
        (tmp_path / name / "manifest.json").write_text('{"rollout_id": 99}')
    assert checkpoints.latest() == first


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    publish(checkpoints, 0, write, {})
    again = publish(checkpoints, 0, lambda path: None, {"attempt": 2})
    assert not (again.path / "weights").exists()
    assert json.loads((again.path / "manifest.json").read_text())["attempt"] == 2


def test_a_bad_older_one_and_a_copy_stop_neither_a_resume_nor_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for rollout_id in range(4):
        publish(checkpoints, rollout_id, write, {})
    (tmp_path / "step_000001" / "manifest.json").write_text('{"rollout_id": 0, "fi')
    latest = checkpoints.latest()
    assert latest is not None and latest.path.name == "step_000004"
    shutil.copytree(tmp_path / "step_000002", tmp_path / "step_000900")
    assert [path.name for path in checkpoints.prune(2)] == ["step_000002"]
    assert "step_000001" in caplog.text and "step_000900" in caplog.text
    left = ["step_000001", "step_000003", "step_000004", "step_000900"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_bad_newest_one_is_named_with_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    publish(checkpoints, 0, write, {})
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000900")
    with pytest.raises(ValueError, match=r"(?s)step_000900.*does not belong.*resume from step_000001"):
        checkpoints.latest()


def test_subfolders_without_a_description_are_hashed_and_checked(tmp_path: Path) -> None:
    def write_folders(path: Path) -> None:
        write(path)
        for name in ("empty", "notes", "trainer"):
            (path / name).mkdir()
        (path / "notes" / "a").write_text("mine")
        (path / "trainer" / "fusionrl.json").write_text("{}")
        (path / "trainer" / "shard").write_text("hashed by the trainer")

    checkpoint = publish(Checkpoints(tmp_path), 0, write_folders, {})
    Checkpoints.check(checkpoint)
    folders = checkpoint.manifest["folders"]
    assert {name: list(facts) for name, facts in folders.items()} == {"notes": ["a"], "trainer": ["fusionrl.json"]}
    (checkpoint.path / "notes" / "a").write_text("else")
    with pytest.raises(ValueError, match="in notes: a is not what was saved"):
        Checkpoints.check(checkpoint)


def test_a_checkpoint_of_the_version_before_hashes_is_let_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def write_trainer(path: Path) -> None:
        (path / "trainer").mkdir()
        (path / "trainer" / "fusionrl.json").write_text('{"format": 1}')
        (path / "buffer.json").write_text("{}")

    path = publish(checkpoints, 0, write_trainer, {}).path
    manifest = json.loads((path / "manifest.json").read_text())
    old = {name: value for name, value in manifest.items() if name not in ("format", "files", "folders")}

    def check_with(manifest: dict[str, Any]) -> None:
        (path / "manifest.json").write_text(json.dumps(manifest))
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.check(latest)

    check_with(old)
    assert len(caplog.records) == 1 and "without hashes" in caplog.text
    with pytest.raises(ValueError, match="lists no files with hashes"):  # the new format, its hashes taken out
        check_with(old | {"format": manifest["format"]})
    (path / "trainer" / "fusionrl.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="lists no files with hashes"):
        check_with(old)
    (path / "trainer" / "fusionrl.json").write_text('{"format": 1}')
    os.mkfifo(path / "pipe")
    with pytest.raises(ValueError, match="lists no files with hashes"):
        check_with(old)
