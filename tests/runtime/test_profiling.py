"""Profiles are begun and ended with their steps, and what goes wrong with one does not end the run."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.run import ProfileOrder
from fusionrl.runtime.telemetry import Profiling
from fusionrl.weights.remote_calls import LocalActor


class Noted:
    """A process that notes what it is asked."""

    def __init__(self, log: list[str], name: str, fails: bool = False) -> None:
        self._log, self._name, self._fails = log, name, fails

    def start_profile(self, *given: str) -> None:
        if self._fails:
            raise RuntimeError("the profiler is in use")
        self._log.append(f"{self._name} starts {given[0]}" + (f" as {given[2]}" if len(given) > 1 else ""))

    def stop_profile(self, *given: str) -> None:
        self._log.append(f"{self._name} stops" + (f": {Path(given[1]).name}" if given else ""))


def _profiling(
    log: list[str], tmp_path: Path, *, is_continuous: bool = False, fails: bool = False, last: int = 7
) -> Profiling:
    trainers = [LocalActor(lambda r=r: Noted(log, f"trainer {r}", fails), f"t{r}") for r in range(3)]
    engines = [LocalActor(lambda i=i: Noted(log, f"engine {i}"), f"e{i}") for i in range(2)]
    order = ProfileOrder(((2, 3), (6, 6)), frozenset({1}), frozenset({0}), "torch", is_continuous)
    parts: Any = SimpleNamespace(policy=trainers), SimpleNamespace(engines=engines, left_out=set())
    return Profiling(order, *parts, tmp_path, 4, last)


def _run(tmp_path: Path, **options: Any) -> list[str]:
    """Seven steps; returns what happened."""
    log: list[str] = []
    profiling = _profiling(log, tmp_path, **options)
    for step in range(1, 8):
        profiling.begin(step)
        log.append(f"step {step}")
        profiling.end(step)
    return log


def test_each_step_has_a_profile_of_its_own(tmp_path: Path) -> None:
    log = _run(tmp_path)
    assert (log[0], log[3]) == ("step 1", "step 2")
    assert set(log[1:3]) == {"trainer 1 starts torch", "engine 0 starts torch as step_000002.engine-0.a4"}
    assert set(log[4:6]) == {"trainer 1 stops: step_000002.trainer-1.a4", "engine 0 stops"}
    assert [line for line in log if line.startswith("trainer 1 stops")] == [
        f"trainer 1 stops: step_00000{step}.trainer-1.a4" for step in (2, 3, 6)
    ]
    assert not any(line.startswith(("trainer 0", "engine 1")) for line in log)


def test_an_engine_that_is_left_out_has_no_profile(tmp_path: Path) -> None:
    log: list[str] = []
    profiling = _profiling(log, tmp_path)
    profiling._pool.left_out = {0}
    profiling.begin(2)
    assert log == ["trainer 1 starts torch"]


def test_steps_that_follow_each_other_may_have_one_profile(tmp_path: Path) -> None:
    log = _run(tmp_path, is_continuous=True)
    assert log.index("trainer 1 starts torch") < log.index("step 2") < log.index("step 3")
    assert log.index("step 3") < log.index("trainer 1 stops: step_000002.trainer-1.a4") < log.index("step 4")
    assert len([line for line in log if line.startswith("trainer 1 stops")]) == 2


def test_a_profile_that_cannot_begin_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "step 7" in _run(tmp_path, fails=True)
    assert "step 2: a profile could not be begun: the profiler is in use" in caplog.text


@pytest.mark.parametrize("last", [2, 7])
def test_a_stretch_ends_with_the_run(tmp_path: Path, last: int) -> None:
    log: list[str] = []
    profiling = _profiling(log, tmp_path, is_continuous=True, last=last)
    profiling.begin(2)
    profiling.end(2)
    assert ("trainer 1 stops: step_000002.trainer-1.a4" in log) == (last == 2)
    profiling.close()  # a run that is stopped after step 2
    profiling.close()
    assert [line for line in log if line.startswith("trainer 1 stops")] == ["trainer 1 stops: step_000002.trainer-1.a4"]
