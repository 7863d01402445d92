"""The driver raises its limit of open files before it starts anything; an actor does so by itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.runtime import early_start
from fusionrl.runtime.actor_process import ProcessSettings
from fusionrl.runtime.launcher import Launcher


@pytest.fixture
def few_files() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield min(before[1], 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_driver_before_it_starts_ray(few_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> Path:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
        raise KeyboardInterrupt

    monkeypatch.setattr(early_start, "make_private_folder", begin)
    plan: Any = SimpleNamespace(device="cpu")
    with pytest.raises(KeyboardInterrupt):
        Launcher(Config(), plan, tmp_path, 1).start()


def test_an_actor_of_a_cluster_that_the_run_has_joined(few_files: int) -> None:
    ProcessSettings(0o022).apply()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
