"""A trainer's profiles: torch's lies in the timeline where the work was; of a GPU, the calls of torch.cuda."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionrl.observe import spans
from fusionrl.observe.timeline.records import read_attempt
from fusionrl.observe.timeline.trace_file import build, read_trace, trace_files
from fusionrl.trainer.profiler import Profiled
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
    multiplied = [
        one for part in read_trace(path, process, recorded).values() for one in part if one.name == "aten::mm"
    ]
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
    assert asked == [
        ("history", ("max_entries", 1_000_000)),
        ("snapshot", f"{path}.pickle"),
        ("history", ("enabled", None)),
    ]
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
