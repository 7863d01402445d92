"""A step's end: what is recorded and saved when a stop request comes in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.config.config import Config
from fusionrl.observe import spans
from fusionrl.observe.timeline.records import read_attempt
from fusionrl.runtime import loops
from fusionrl.runtime.loops import on_policy
from fusionrl.runtime.step import idle_shares
from fusionrl.runtime.supervisor import StopSignal, Terminated
from tests.runtime.run_fakes import Cluster, run_of


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as signal_:
        yield signal_


@pytest.mark.parametrize(
    ("stops", "rest"),
    [
        ("train 1", []),  # no push for engines that end now
        ("push 2", ["push 2", "evaluate 2"]),
        ("evaluate 2", ["push 2", "evaluate 2"]),
    ],
)
def test_a_stop_after_training_loses_no_row_and_no_checkpoint(stop: StopSignal, stops: str, rest: list[str]) -> None:
    """The rollout counts as trained, so a resume begins after it: its row has to be there."""
    run, diary = run_of(Cluster(stops), stop)
    with pytest.raises(Terminated):
        on_policy(run)
    assert diary.log[diary.log.index("train 1") :] == ["train 1", *rest, "record 2", "save 1"]
    assert run.last_trained == 1 and diary.rows[2]["train/loss"] == 1.0


def test_an_error_records_nothing(stop: StopSignal) -> None:
    cluster = Cluster()
    run, diary = run_of(cluster, stop)

    cluster.trainers.train = Mock(side_effect=RuntimeError("trainer rank 1 died"))
    with pytest.raises(RuntimeError, match="rank 1"):
        on_policy(run)
    assert diary.log == ["push 0", "record 0", "generate 0"] and run.last_trained == -1


def test_the_time_of_training_is_that_of_its_phase(stop: StopSignal, tmp_path: Path) -> None:
    """Without the wait for rows of samples that a slow disk has not written yet: that has a phase of its own."""
    run, diary = run_of(Cluster(), stop, 1)
    run.actors.buffer.add_trained = lambda *_: time.sleep(0.2)
    spans.record_to(tmp_path, "driver", 1)
    try:
        on_policy(run)
    finally:
        spans.stop_recording()
    train, columns, record = (
        read_attempt(tmp_path, 1).of("driver", name)[0] for name in ("train", "columns", "record")
    )
    assert diary.rows[1]["perf/time_train_s"] * 1e6 <= train.duration + 2
    assert train.end <= columns.start and columns.duration >= 0.19e6 and columns.end <= record.start
    assert [one.facts["step"] for one in (train, columns, record)] == [1, 1, 1]


def test_the_idle_share_of_a_step() -> None:
    times = {"perf/step_time_s": 10.0, "perf/time_train_s": 3.0, "perf/time_sync_s": 1.0, "perf/time_generate_s": 6.0}
    assert idle_shares(times, True) == pytest.approx({"perf/trainers_idle": 0.6, "perf/engines_idle": 0.4})
    assert idle_shares(times | {"perf/engines_idle": 0.1}, True) == pytest.approx({"perf/trainers_idle": 0.6})
    assert idle_shares(times, False).keys() == {"perf/trainers_idle"}, "a run without engines"


# --------------------------------------------------------------------- which loop runs a configuration
@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        ({}, loops.on_policy),
        ({"pipeline": "async"}, loops.streamed),
        ({"mode": "sft"}, loops.sft),
        ({"mode": "reject-sampling"}, loops.reject_sampling),
        ({"mode": "eval"}, loops.evaluate_only),
        ({"debug_train_only": True}, loops.train_only),
        ({"mode": "sft", "debug_train_only": True}, loops.sft),
        ({"debug_rollout_only": True}, loops.rollout_only),
    ],
)
def test_the_loop_of_a_mode(flags: dict[str, Any], loop: loops.Loop) -> None:
    assert loops.choose_loop(Config.from_flat(flags)) is loop


@pytest.mark.parametrize(
    ("loop", "flags", "log"),
    [
        (loops.on_policy, {}, "push 0, record 0, generate 0, train 0, push 1, evaluate 1, record 1, save 0"),
        (loops.sft, {"mode": "sft"}, "generate 0, train 0, record 1, save 0, generate 1, train 1"),
        (loops.reject_sampling, {"mode": "reject-sampling"}, "push 0, generate 0, record 1, save 0"),
        (loops.rollout_only, {"debug_rollout_only": True}, "generate 0, record 1, generate 1, record 2"),
        (loops.train_only, {"debug_train_only": True}, "generate 0, train 0, record 1, save 0"),
        (loops.evaluate_only, {"mode": "eval"}, "evaluate 0, record 0"),
    ],
)
def test_the_order_of_things(loop: loops.Loop, flags: dict[str, Any], log: str) -> None:
    run, diary = run_of(Cluster(), StopSignal(), **flags)
    loop(run)
    assert ", ".join(diary.log).startswith(log)
    if loop is loops.on_policy:
        assert {"perf/step_time_s", "perf/tokens_per_s", "perf/time_train_s", "eval/x/reward"} <= set(diary.rows[1])
    if loop is loops.sft:
        assert {"perf/step_time_s", "perf/tokens_per_s", "eval/x/loss"} <= set(diary.rows[1])
    if loop is loops.reject_sampling:  # weights are pushed once, and the first row says so
        assert "sync/version" in diary.rows[1] and "sync/version" not in diary.rows[2]
        assert diary.lines[-1] == "accepted 4 of 6 samples: accepted.jsonl"
