"""A wait that lasts tells whom it waits for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.runtime import supervisor
from fusionrl.runtime.supervisor import LongWait


class Clock:
    """Time, and calls of an actor that are answered at a moment (None: never)."""

    def __init__(self, answers: list[tuple[float | None, Any]]) -> None:
        self.now, self.asked_at, self._answers = 0.0, list[float](), answers

    def monotonic(self) -> float:
        return self.now

    def ask(self) -> Any:
        self.asked_at.append(self.now)
        seconds, answer = self._answers[len(self.asked_at) - 1]
        return (float("inf") if seconds is None else self.now + seconds), answer

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        done = [ref for ref in refs if ref[0] <= self.now]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any) -> Any:
        if isinstance(ref[1], Exception):
            raise ref[1]
        return ref[1]


@pytest.fixture
def wait_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def run(seconds: int, *answers: tuple[float | None, Any]) -> Clock:
        clock = Clock(list(answers))
        exceptions = SimpleNamespace(RayError=OSError)
        monkeypatch.setattr(supervisor, "ray", SimpleNamespace(exceptions=exceptions))
        monkeypatch.setattr(supervisor, "wait", clock.wait)
        monkeypatch.setattr(supervisor, "get", clock.get)
        monkeypatch.setattr(supervisor, "time", clock)
        wait = LongWait(clock.ask)
        for clock.now in map(float, range(seconds)):
            wait.look()
        return clock

    return run


def test_it_is_told_after_five_minutes_and_then_less_often(wait_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = wait_of(1500, (0.0, "3 of 4 groups are ready"), (2.0, "2 of 4 groups are ready"), (0.0, "nothing"))
    assert clock.asked_at == [300.0, 600.0, 1200.0]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "trainers have waited 5.0 minutes: 3 of 4 groups are ready"
    assert told[1] == "trainers have waited 10.0 minutes: 2 of 4 groups are ready"


def test_a_short_wait_asks_nothing(wait_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert wait_of(299).asked_at == [] and caplog.text == ""


def test_nobody_waits_or_the_buffer_is_dead(wait_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    wait_of(800, (0.0, ""), (0.0, OSError("the actor died")))
    assert caplog.text == ""


def test_a_function_that_blocks_the_event_loop(wait_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = wait_of(900, (None, ""))
    assert clock.asked_at == [300.0]
    assert "trainers have waited 6.0 minutes, and the Buffer does not answer: a user function" in caplog.text
    assert len(caplog.records) == 1
