"""tools/bench/engine_parts.py: the clock around parts, and what is printed. Whole, the program needs an engine."""

from __future__ import annotations

import time

import pytest

from tools.bench.engine_parts import Clock, report
from tools.bench.train_parts import ELEMENTWISE, by_kind


def test_the_time_of_a_part_is_without_that_of_the_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()

    def inner() -> str:
        nonlocal now
        now += 2.0
        return "value"

    timed = clock.around("inner", inner)

    def outer() -> str:
        nonlocal now
        now += 0.5
        return timed() + timed()

    assert clock.around("outer", outer)() == "valuevalue"
    assert clock.seconds == {"inner": 4.0, "outer": 0.5}


def test_a_part_that_raises_is_counted() -> None:
    clock = Clock()

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock.around("part", fails)()
    clock.around("next", lambda: None)()
    assert set(clock.seconds) == {"part", "next"}


def test_the_table_has_medians(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [
        (2.0, {"model": 1.0, "else": 1.0}, {"scheduler": 3.0}),
        (1.0, {"model": 0.9, "else": 0.1}, {"scheduler": 1.0}),
    ]
    report([*rounds, rounds[0]])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["round", "2000", "ms"], ["model", "1000.0", "ms", "50.0%"]]
    assert lines[-1] == ["CPU", "of", "scheduler", "3.00", "s"]


def test_operators_of_a_training_step_are_added_up_by_kind() -> None:
    seconds = {"aten::mm": 4.0, "aten::addmm_": 1.0, "aten::cat": 0.5, "aten::mul": 0.25, "_SwiGLUBackward": 9.0}
    assert by_kind(seconds) == {"products": 5.0, "copies": 0.5, ELEMENTWISE: 0.25}
