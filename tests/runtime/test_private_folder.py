"""The private folder of a run: where it is, and whom it lets in."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from fusionrl.runtime.early_start import make_private_folder


def test_a_short_folder_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    parent = tempfile.mkdtemp(dir="/tmp", prefix="t")
    monkeypatch.setenv("RAY_TMPDIR", parent)
    try:
        folder = make_private_folder()
        assert str(folder.parent) == parent and not caplog.records
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (folder, folder / "ray", folder / "stores"))
    finally:
        shutil.rmtree(parent)


@pytest.mark.parametrize(
    ("variable", "name", "reason"),
    [
        ("RAY_TMPDIR", "with-a-long-name", "at most 24 characters"),
        ("TMPDIR", "with-a-long-name", "at most 24 characters"),
        ("TMPDIR", "ï", "ASCII without white space"),
        ("TMPDIR", "a b", "ASCII without white space"),
    ],
)
def test_one_where_ray_has_no_sockets_is_not_and_the_log_says_why(
    variable: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent = Path(tempfile.mkdtemp(dir="/tmp", prefix="t"), name)
    parent.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(parent))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is found once
    folder = make_private_folder()
    try:
        assert folder.parent == Path("/tmp")
        assert f"{variable}={parent} is not used" in caplog.text and reason in caplog.text
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(parent.parent)
