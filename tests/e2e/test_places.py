"""Runs whose folders have spaces and letters such as ï, and odd temporary and home folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


@pytest.mark.cold
def test_model_data_run_and_temporary_folder_may_have_odd_names(
    task: Path, rl_flags: list[str], tmp_path: Path
) -> None:
    """With a temporary folder that is too long for sockets, and no home: both have a place of their own."""
    folder = tmp_path / "ein ï, und (mehr)"
    shutil.copytree(task, folder / "task")
    flags = [flag.replace(str(task), str(folder / "task")) for flag in rl_flags]
    temporary = folder / ("long-" * 20)
    temporary.mkdir()
    flags += ["--num-rollout", "1", "--save-interval", "1", "--save-hf", str(folder / "h f"), "--n-samples-per-prompt"]
    env = {"TMPDIR": str(temporary), "HOME": str(tmp_path / "none" / "here")}
    run([*flags, "2", "--rollout-batch-size", "2", "--run-dir", str(folder / "r un")], tmp_path, **env)
    assert any("train/loss" in row for row in metrics_of(folder / "r un"))
    assert (folder / "h f" / "model.safetensors").is_file()
