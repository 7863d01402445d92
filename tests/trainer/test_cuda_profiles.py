"""Profiles of a GPU: what torch.cuda is asked for. torch.cuda is a fake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionrl.trainer.profiler import Profiled


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Calls of torch.cuda, in order."""
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
