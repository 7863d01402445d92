"""Profiles and times of a GPU: what torch.cuda is asked for. torch.cuda is a fake."""

from __future__ import annotations

import subprocess
import sys
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


TIMES = """
from types import SimpleNamespace
import torch
from fusionrl.cpu import megatron_patches
megatron_patches.install()
from fusionrl.trainer.megatron_spans import record_megatron

made = []
def event(**options):
    made.append(options)
    return SimpleNamespace(record=lambda: None)

torch.cuda.Event = event
for device in ("cpu", "cuda"):
    inner = SimpleNamespace(config=SimpleNamespace(timers=None))
    trained = SimpleNamespace(transformer=SimpleNamespace(timers=None), optimizer=SimpleNamespace())
    trained.optimizer.chained_optimizers = [inner]
    spans = record_megatron(trained, torch.device(device))
    assert trained.transformer.timers is inner.config.timers is spans
    spans._now()
    print(device, made)
"""


def test_times_of_a_gpu_are_its_events() -> None:
    done = subprocess.run([sys.executable, "-c", TIMES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["cpu []", "cuda [{'enable_timing': True}]"], done.stderr
