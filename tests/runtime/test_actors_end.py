"""The end of a run's processes: a profile under way is written first, but not where a process may be dead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.supervisor import Terminated


@pytest.mark.parametrize(
    ("error", "is_written"),
    [
        (None, True),
        (Terminated("SIGTERM"), True),
        (KeyboardInterrupt(), False),
        (RuntimeError("a rank died"), False),
    ],
)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_profile_is_written_before_the_processes_end(
    error: BaseException | None, is_written: bool, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def write() -> None:
        log.append("profile")
        if breaks:
            raise OSError("the disk is full")

    actors: Any = object.__new__(Actors)
    actors._watchdog = SimpleNamespace(ended_by=lambda error: None, __exit__=lambda: log.append("watchdog"))
    actors.profiling = SimpleNamespace(close=write)
    actors._launcher = SimpleNamespace(keep_ray_logs=lambda: log.append("logs"))
    monkeypatch.setattr(actors, "_find_death", lambda error: None)
    monkeypatch.setattr(actors, "close", lambda: log.append("processes"))
    if breaks and is_written:
        with pytest.raises(OSError, match="full"):
            actors._end(error)
    else:
        actors._end(error)
    assert [entry for entry in log if entry != "logs"] == ["watchdog", *["profile"] * is_written, "processes"]
