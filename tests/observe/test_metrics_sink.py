"""metrics.jsonl: what is appended, what a kill leaves, and which line counts after a resume."""

import importlib.util
import json
import math
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fusionrl.observe.metrics import STEP_TIME, MetricsSink, next_attempt, read_metrics
from fusionrl.observe.metrics import read_lines as track_lines
from fusionrl.observe.rollouts import RolloutWriter


def _raw(run_dir: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _log(folder: Path, attempt: int, *lines: tuple[int, dict]) -> None:
    with MetricsSink(folder, attempt) as sink:
        for step, values in lines:
            sink.log(step, values)


def test_a_line_is_on_disk_when_log_returns_and_holds_numpy_and_torch_scalars(tmp_path: Path) -> None:
    sink = MetricsSink(tmp_path, attempt=1)
    sink.log(3, {"train/loss": torch.tensor(0.5), "rollout/reward": np.float32(0.25), "n": np.int64(7), "kind": "disk"})
    (line,) = _raw(tmp_path)
    assert abs(line.pop("time") - (tmp_path / "metrics.jsonl").stat().st_mtime) < 60
    assert line == {"step": 3, "attempt": 1, "train/loss": 0.5, "rollout/reward": 0.25, "n": 7, "kind": "disk"}


def test_train_and_eval_lines_of_a_step_become_one(tmp_path: Path) -> None:
    trained, evaluated = {"train/loss": math.nan, "train/lr": 0.1}, {"eval/gsm8k/accuracy": 0.5, "train/lr": math.inf}
    _log(tmp_path, 1, (1, trained), (1, evaluated), (0, {"train/loss": 1.0}))
    assert _raw(tmp_path)[0]["train/loss"] is None and _raw(tmp_path)[0]["nonfinite"] == ["train/loss"]
    zero, one = read_metrics(tmp_path / "metrics.jsonl")
    assert (zero["step"], one["step"], one["eval/gsm8k/accuracy"], one["train/loss"]) == (0, 1, 0.5, None)
    assert one["nonfinite"] == ["train/loss", "train/lr"]


def test_a_disk_that_fills_within_a_line_is_an_error(tmp_path: Path) -> None:
    """The system writes the part that fits, without an error; a limit of the file's size acts like a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt in (1, 2):
        with MetricsSink(tmp_path, attempt) as sink:
            sink.log(1, {"train/loss": 0.5})
            resource.setrlimit(resource.RLIMIT_FSIZE, (sink.path.stat().st_size + 20, unlimited[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    sink.log(2, {"train/loss": 0.25})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            sink.log(2, {"train/loss": 0.125})
        assert [row["train/loss"] for row in read_metrics(tmp_path)] == [0.5, 0.125], "there is room again"


def test_the_step_of_a_checkpoint_keeps_its_metrics_after_a_resume(tmp_path: Path) -> None:
    """A resume writes its first push to the step of its checkpoint, and does only later steps again."""
    first = [(step, {"train/loss": 1.0 / step, STEP_TIME: 0.5, "sync/seconds": 1.0}) for step in (1, 2, 3)]
    _log(tmp_path, 1, *first, (2, {"eval/a": 0.25}))
    _log(tmp_path, 2, (2, {"sync/seconds": 2.0}))
    _log(tmp_path, 3, (2, {"sync/seconds": 3.0}), (3, {"train/loss": 7.0, STEP_TIME: 0.5}))
    _, two, three = read_metrics(tmp_path)
    assert (two["train/loss"], two["eval/a"], two["sync/seconds"], two["attempt"]) == (0.5, 0.25, 3.0, 3)
    assert (three["train/loss"], three["attempt"]) == (7.0, 3) and "sync/seconds" not in three
    lines = [(line.step, line.attempt) for line in track_lines(tmp_path)]
    assert lines == [(1, 1), (2, 1), (2, 1), (2, 2), (2, 3), (3, 3)]


def test_a_torn_line_costs_itself_only_even_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _log(tmp_path, 1, (0, {"train/loss": 1.0}))
    with path.open("a") as file:
        file.write('{"step": 1, "attempt": 1, "train/lo')
    assert [line["step"] for line in read_metrics(path)] == [0] and next_attempt(tmp_path) == 2
    _log(tmp_path, 2, (1, {"train/loss": 3.0}))
    assert [(line["step"], line["train/loss"]) for line in read_metrics(path)] == [(0, 1.0), (1, 3.0)]
    # One that no kill explains is an error.
    path.write_text('{"step": 0, "attempt": 1}\n{"step": 1, "att\n{"step": 2, "attempt": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_what_is_no_metric_is_refused_by_name(tmp_path: Path) -> None:
    mistakes = (("x", np.zeros(3), "'x' has shape"), ("x", [1.0], "'x' is a list"), ("step", 1, "reserved"))
    with MetricsSink(tmp_path, 1) as sink:
        for name, value, said in mistakes:
            with pytest.raises(ValueError, match=said):
                sink.log(0, {name: value})
    assert read_metrics(tmp_path) == []


def test_next_attempt_counts_every_trace(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    (tmp_path / "config.json").write_text("{}")
    assert next_attempt(tmp_path) == 2
    (tmp_path / "config.a2.json").write_text("{}")
    RolloutWriter(tmp_path).write(0, 4, [{"reward": 1}])
    assert next_attempt(tmp_path) == 5


def test_tensorboard_missing_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes the import fail exactly as a missing package does.
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=r"setup-env\.sh trackers"):
        MetricsSink(tmp_path, 1, tensorboard=True)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsSink(tmp_path, 2, tensorboard=True) as sink:
        sink.log(5, {"train/loss": 0.5, "sync/kind": "disk"})
    events = EventAccumulator(str(tmp_path / "tensorboard" / "a2")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 0.5)]


def test_lines_of_one_kind_alone(tmp_path: Path) -> None:
    """A later attempt that only began at a step does not hide who trained it."""
    _log(tmp_path, 1, (3, {"train/loss": 1.0, STEP_TIME: 0.5}))
    _log(tmp_path, 2, (3, {"sync/version": 3}))
    assert [row["attempt"] for row in read_metrics(tmp_path)] == [2]
    (row,) = read_metrics(tmp_path, of_rows_with="train/loss")
    assert (row["attempt"], row["train/loss"]) == (1, 1.0)
