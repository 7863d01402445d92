"""The programs that a raylet starts in the place of Ray's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray._private import services, workers

from fusionrl.runtime.ray_processes import _sleeper
from fusionrl.runtime.ray_setup_worker import without_starter

_SETUP, _WORKER = (str(Path(workers.__path__[0], name)) for name in ("setup_worker.py", "default_worker.py"))


def test_a_worker_with_an_environment_of_its_own_is_no_fork() -> None:
    """Ray's second program gets the worker's own words, of which it may replace the first."""
    assert services.__file__
    word = _sleeper(f"--python_worker_command={sys.executable} {_SETUP} {_WORKER} --node-ip-address=127.0.0.1", False)
    python, setup, *rest = word.partition("=")[2].split()
    assert python == sys.executable
    assert Path(setup).is_file() and "setup_worker.py" in setup and setup != _SETUP, "a raylet looks for this name"
    assert [Path(one).name for one in rest[:4]] == ["-I", "-S", "worker_starter.py", "default_worker.py"]
    assert without_starter(rest) == [_WORKER, "--node-ip-address=127.0.0.1"]
    assert without_starter([_WORKER]) == [_WORKER], "a Ray whose commands are others"


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None), (" 08", 8)]
)
def test_threads_of_a_fork(text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenMP takes for no number changes nothing, and ends no worker."""
    import torch

    from fusionrl.runtime.worker_fork import _limit_threads

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    _limit_threads(text)
    assert found == ([] if expected is None else [expected])
