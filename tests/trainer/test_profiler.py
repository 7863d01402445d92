"""A trainer's profile by torch: it is written whole, and lies in the timeline where the work was."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from fusionrl.observe import spans
from fusionrl.observe.timeline.records import read_attempt
from fusionrl.observe.timeline.torch_traces import read_trace, trace_files
from fusionrl.observe.timeline.trace_file import build
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
