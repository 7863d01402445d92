"""A trainer's profiles, torch's and those of a GPU, and Megatron's timers as spans in the timeline."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionrl.observe import spans
from fusionrl.observe.timeline.records import read_attempt
from fusionrl.observe.timeline.trace_file import build, read_trace, trace_files
from fusionrl.trainer.megatron_core import MegatronSpans
from fusionrl.trainer.trainer_base import Profiled
from tests.observe.trace_format import faults


def test_torch_s_trace_lies_where_the_work_was(tmp_path: Path) -> None:
    spans.record_to(tmp_path, "driver", 1)
    spans.record_to(tmp_path, "trainer-0", 1)
    rank = Profiled()
    rank.start_profile("torch")
    time.sleep(0.05)
    with spans.phase("train", step=3):
        torch.mm(torch.randn(300, 300), torch.randn(300, 300))
    time.sleep(0.05)
    rank.stop_profile("torch", str(tmp_path / "profiles" / "step_000003.trainer-0.a1"))
    spans.stop_recording()

    recorded = read_attempt(tmp_path, 1)
    ((process, _, path),) = trace_files(tmp_path, 1, None)
    assert process == "trainer-0"
    (train,) = recorded.of("trainer-0", "train")
    parts = read_trace(path, process, recorded).values()
    multiplied = [one for part in parts for one in part if one.name == "aten::mm"]
    assert multiplied
    for one in multiplied:  # within the span, but for the 5 ms by which clocks may differ
        assert train.start - 5_000 <= one.start and one.end <= train.end + 5_000
    trace = build(tmp_path, recorded, {})
    assert any(event["name"] == "aten::mm" for event in trace.events)
    assert faults(trace.events) == []
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Calls of torch.cuda, a fake, in order."""
    calls: list[tuple[object, ...]] = []

    def note(name: str) -> Any:
        return lambda *values, **options: calls.append((name, *values, *options.items()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", note("history"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", note("snapshot"))
    monkeypatch.setattr(torch.cuda, "profiler", SimpleNamespace(start=note("start"), stop=note("stop")))
    return calls


def test_the_memory_and_nsys(asked: list[tuple[object, ...]], tmp_path: Path) -> None:
    process, path = Profiled(), str(tmp_path / "profile")
    process.start_profile("memory")
    process.stop_profile("memory", path)
    begin, end = ("history", ("max_entries", 1_000_000)), ("history", ("enabled", None))
    assert asked == [begin, ("snapshot", f"{path}.pickle"), end]
    asked.clear()
    process.start_profile("nsys")
    process.stop_profile("nsys", path)
    assert asked == [("start",), ("wait",), ("stop",)], "the kernels have ended before the profile does"


def test_torchs_trace_has_the_gpus_kernels(asked: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[torch.profiler.ProfilerActivity]] = []
    profile = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda *, activities: wanted.append(activities) or profile)
    Profiled().start_profile("torch")
    assert wanted == [[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]]


# --- Megatron's timers as spans ---
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
        patch.setattr("fusionrl.trainer.megatron_core.time", SimpleNamespace(monotonic_ns=lambda: next(now)))
        for name in ("embedding-grads-all-reduce", "all-grads-sync"):
            timers(name, log_level=1).start()
            timers(name).stop()
    assert [name for name, _, _, _ in records()] == ["all-grads-sync"]


class _Event:
    """That of a GPU which is a second late; the real one's cannot be had here."""

    now = 0.0

    def record(self) -> None:
        self.at = _Event.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 1000 * (end.at - self.at)


def test_on_a_gpu_times_are_those_of_its_stream(records: Any) -> None:
    timers = MegatronSpans(_Event)

    def work() -> None:
        _Event.now += 0.25

    _micro_batches(timers, 2, work)
    assert records() == []  # nothing is waited for in between
    timers.settle()
    now = time.monotonic_ns() // 1000 - spans.recorder().start_ns // 1000
    found = records()
    assert [duration for _, _, _, duration in found] == pytest.approx([250_000] * 4 + [1_000_000], abs=2)
    assert found[-1][2] + found[-1][3] == pytest.approx(now, abs=100_000)
    timers.settle()
    assert records() == found
