"""Megatron's timers as spans: numbered micro-batches, and on a GPU the times of the GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.observe import spans
from fusionrl.trainer.megatron_spans import MegatronSpans


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Any]:
    spans.record_to(tmp_path, "trainer-0", 1)

    def read() -> list[tuple[str, dict[str, Any], int, int]]:
        spans.recorder().note_clock("", 0, 0)  # at once, with what is before it in memory
        lines = (tmp_path / "timeline" / "trainer-0.a1.jsonl").read_text().splitlines()[1:]
        return [(one[2], one[5], one[3], one[4]) for one in map(json.loads, lines) if one[0] == "X"]

    yield read
    spans.stop_recording()


def _micro_batches(timers: MegatronSpans, number: int, work: Any = lambda: None) -> None:
    timers("forward-backward", log_level=1).start(barrier=False)
    for _ in range(number):
        for name in ("forward-compute", "backward-compute"):
            timers(name, log_level=2).start()
            work()
            timers(name).stop()
    timers("forward-backward").stop()


def test_micro_batches_are_numbered_anew_in_each_step(records: Any) -> None:
    timers = MegatronSpans()
    for _ in range(2):
        _micro_batches(timers, 2)
    found = [(name, facts.get("micro_batch")) for name, facts, _, _ in records()]
    one_step = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("forward-backward", None)]
    assert found == one_step * 2


def test_what_does_nothing_is_not_recorded(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that share no embeddings, say: Megatron calls the timers all the same."""
    timers, begin = MegatronSpans(), time.monotonic_ns()
    now = iter([begin, begin + 10_000, begin + 20_000, begin + 2_000_000])  # a busy machine may stop us in between
    with monkeypatch.context() as patch:
        patch.setattr("fusionrl.trainer.megatron_spans.time", SimpleNamespace(monotonic_ns=lambda: next(now)))
        for name in ("embedding-grads-all-reduce", "all-grads-sync"):
            timers(name, log_level=1).start()
            timers(name).stop()
    assert [name for name, _, _, _ in records()] == ["all-grads-sync"]


class _Gpu:
    """A GPU that is a second late; the real one's events cannot be had here."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Any:
        gpu = self

        class Event:
            def record(self) -> None:
                self.at = gpu.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return 1000 * (end.at - self.at)

        return Event()


def test_on_a_gpu_times_are_those_of_its_stream(records: Any) -> None:
    gpu = _Gpu()
    timers = MegatronSpans(gpu.event)

    def work() -> None:
        gpu.now += 0.25

    _micro_batches(timers, 2, work)
    assert records() == []  # nothing is waited for in between
    timers.settle()
    now = time.monotonic_ns() // 1000 - spans.recorder().start_ns // 1000
    found = records()
    assert [duration for _, _, _, duration in found] == pytest.approx([250_000] * 4 + [1_000_000], abs=2)
    assert found[-1][2] + found[-1][3] == pytest.approx(now, abs=100_000)
    timers.settle()
    assert records() == found
