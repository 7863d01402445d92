"""A step's end: what is recorded and saved when a stop request comes in the middle of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.buffer.actor import Rollout
from fusionrl.config.config import Config
from fusionrl.driver.context import Run
from fusionrl.driver.loops import on_policy
from fusionrl.driver.signals import StopSignal, Terminated


class Cluster:
    """Actors that note what they are asked; at the `n`-th call of a name in `stops` SIGTERM comes."""

    def __init__(self, stops: str = "", number: int = 1) -> None:
        self.log: list[str] = []
        self._stops, self._left = stops, number
        self.trainers: Any = SimpleNamespace(train=self.train, offload=lambda: None, sample_columns=lambda _: [])
        self.weights = SimpleNamespace(version=0, push=self.push, restore_engines=lambda: None)
        self.engines = SimpleNamespace(release_memory=lambda: None)
        self.buffer = SimpleNamespace(
            start_rollout=lambda rollout_id, version: rollout_id,
            wait_rollout=lambda started: Rollout(started, [], {"rollout/num_tokens": 6.0}),
            start_evaluation=lambda step: step,
            wait_evaluation=self.evaluate,
            add_trained=lambda *_: None,
        )

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what.startswith(self._stops) and self._stops:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def train(self, rollout_id: int, *_: Any) -> dict[str, float]:
        self._note(f"train {rollout_id}")
        return {"train/loss": 1.0}

    def push(self, version: int) -> dict[str, float]:
        self._note(f"push {version}")
        return {"sync/version": float(version)}

    def evaluate(self, step: int) -> dict[str, float]:
        self._note(f"evaluate {step}")
        self.stop.check()  # as the supervisor does
        return {"eval/x/accuracy": 1.0, "eval/x/reward": 1.0}


class Diary:
    """Reporter and Saver in one."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.rows = log, dict[int, dict[str, float]]()

    def record(self, step: int, values: dict[str, float]) -> None:
        self.log.append(f"record {step}")
        self.rows[step] = values

    def recorded(self, step: int) -> dict[str, float]:
        return self.rows.get(step, {})

    def save_if_due(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.log.append(f"save {rollout_id}")
        assert metrics is self.rows[rollout_id + 1]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as signal_:
        yield signal_


def run_of(cluster: Any, stop: StopSignal, num_rollout: int = 2) -> tuple[Run, Diary]:
    diary: Any = Diary(cluster.log)
    cluster.stop = stop
    config = Config.from_flat({"eval_interval": 1, "skip_eval_before_train": True})
    plan: Any = SimpleNamespace(num_rollout=num_rollout)
    return Run(config, plan, Path(), cluster, diary, diary, stop, 0, -1), diary


def test_a_run_to_its_end(stop: StopSignal) -> None:
    run, diary = run_of(Cluster(), stop, 1)
    on_policy(run)
    assert diary.log == ["push 0", "record 0", "train 0", "push 1", "evaluate 1", "record 1", "save 0"]
    assert {"perf/step_time_s", "perf/tokens_per_s", "perf/time_train_s", "eval/x/reward"} <= set(diary.rows[1])


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

    def fail(*_: Any) -> Any:
        raise RuntimeError("trainer rank 1 died")

    cluster.trainers.train = fail
    with pytest.raises(RuntimeError, match="rank 1"):
        on_policy(run)
    assert diary.log == ["push 0", "record 0"] and run.last_trained == -1
