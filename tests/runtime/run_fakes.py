"""Actors, reporter and saver that only note what they are asked."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.runtime.restarts import Restarts
from fusionrl.runtime.run import Run
from fusionrl.runtime.supervisor import StopSignal
from fusionrl.weights.remote_calls import get, put


class Trainers(list[str]):
    """Two trainers."""

    def __init__(self, train: Any) -> None:
        super().__init__(["rank 0", "rank 1"])
        self.train = train
        self.offload, self.sample_columns = Mock(), Mock(return_value=[])
        self.last_trained: Callable[[], list[int | None]] = Mock(return_value=[0])
        self.validation_losses = Mock(return_value={"eval/x/loss": 1.0})

    def call(self, method: str, *args: Any) -> list[Any]:
        return [put(answer) for answer in getattr(self, method)(*args)]


class Cluster:
    """Actors that note what they are asked; at the `n`-th call of a name in `stops` SIGTERM comes."""

    def __init__(self, stops: str = "", number: int = 1) -> None:
        self.log: list[str] = []
        self.error_at = ""  # the entry with which an error comes
        self.is_beside = False
        self.done: set[int] = set()  # evaluations whose results are there
        self._stops, self._left = stops, number
        self.trainers: Any = Trainers(self.train)
        self.weights = SimpleNamespace(version=0, push=self.push, prepare_round=lambda: None)
        self.profiling, self.clocks, self.engines, self.check_engines = Mock(), Mock(), Mock(), Mock()
        self.hardware = Mock(**{"measure.return_value": {}})
        self.restarts = Restarts(3)
        self.buffer = SimpleNamespace(
            start_rollout=lambda rollout_id, version: rollout_id,
            wait_rollout=self.generate,
            start_evaluation=self.start_evaluation,
            is_done=lambda step: step in self.done,
            wait_evaluation=self.evaluate,
            add_trained=lambda *_: None,
            next_rollout=lambda rollout_id: rollout_id,
            validation_shards=dict,
            last_done=-1,
            check=lambda timeout_s: None,
        )
        self.supervisor = SimpleNamespace(wait=get)
        self.recovery = SimpleNamespace(
            train=lambda rollout: self.trainers.train(rollout.rollout_id, rollout.shards),
            retry=lambda call, **_: call(),
            take_snapshot_if_due=lambda rollout_id: None,
            is_behind=False,
        )

    def stream(self, interval: int) -> None:
        """Have a stream that is pushed to after `interval` rollouts."""
        vars(self.buffer).update(
            begin_stream=lambda bring_weights: None,
            rollout_trained=lambda: sum(line.startswith("train") for line in self.log) % interval == 0,
            weights_pushed=lambda version: None,
            end_stream=lambda: self.log.append("stop"),
        )

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.error_at:
            raise RuntimeError(f"{what} failed")
        if what.startswith(self._stops) and self._stops:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def generate(self, started: int) -> Rollout:
        self._note(f"generate {started}")
        numbers = {"rollout/num_tokens": 6.0, "rollout/accepted": 2.0, "rollout/considered": 3.0}
        return Rollout(started, [], numbers)

    def train(self, rollout_id: int, *_: Any) -> dict[str, float]:
        self._note(f"train {rollout_id}")
        return {"train/loss": 1.0, "train/num_tokens": 4.0}

    def push(self, version: int, to_evaluation: bool = False) -> dict[str, float]:
        self._note(f"push {version}" + " to all" * to_evaluation)
        self.weights.version = version
        return {"sync/version": float(version)}

    def start_evaluation(self, step: int, version: int | None) -> int:
        if self.is_beside:
            self.log.append(f"begin evaluation {step}")
        return step

    def evaluate(self, step: int) -> dict[str, float]:
        self._note(f"evaluate {step}")
        if step not in self.done:
            self.stop.check()  # as the supervisor does
        return {"eval/x/accuracy": 1.0, "eval/x/reward": 1.0}


class Diary:
    """Reporter and Saver in one."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.rows, self.lines = log, dict[int, dict[str, float]](), list[str]()

    def record(self, step: int, values: dict[str, float]) -> None:
        self.log.append(f"record {step}")
        self.rows[step] = values

    def record_evaluation(self, step: int, values: dict[str, float]) -> None:
        self.log.append(f"record evaluation {step}")
        self.rows.setdefault(step, {}).update(values)

    def recorded(self, step: int) -> dict[str, float]:
        return self.rows.get(step, {})

    def print(self, text: str) -> None:
        self.lines.append(text)

    def save_if_due(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.log.append(f"save {rollout_id}")
        assert metrics is self.rows[rollout_id + 1]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def run_of(cluster: Any, stop: StopSignal, num_rollout: int = 2, **flags: Any) -> tuple[Run, Diary]:
    diary: Any = Diary(cluster.log)
    cluster.stop, cluster.is_beside = stop, bool(flags.get("eval_num_gpus"))
    config = Config.from_flat({"eval_interval": 1, "skip_eval_before_train": True} | flags)
    bundles = ((2,),) if flags.get("eval_num_gpus") else ()
    plan: Any = SimpleNamespace(num_rollout=num_rollout, transport="broadcast", eval_bundles=bundles)
    plan.engines_give_memory = plan.trainers_give_memory = plan.takes_turns = False
    return Run(config, plan, Path(), cluster, diary, diary, stop, 0, -1), diary
