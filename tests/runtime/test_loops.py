"""Which loop runs a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.runtime import loops
from fusionrl.runtime.supervisor import StopSignal
from tests.runtime.run_fakes import Cluster, run_of


@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        ({}, loops.on_policy),
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
        (
            loops.on_policy,
            {},
            ["push 0", "record 0", "generate 0", "train 0", "push 1", "evaluate 1", "record 1", "save 0"],
        ),
        (loops.sft, {"mode": "sft"}, ["generate 0", "train 0", "record 1", "save 0", "generate 1", "train 1"]),
        (loops.reject_sampling, {"mode": "reject-sampling"}, ["push 0", "generate 0", "record 1", "save 0"]),
        (loops.rollout_only, {"debug_rollout_only": True}, ["generate 0", "record 1", "generate 1", "record 2"]),
        (loops.train_only, {"debug_train_only": True}, ["generate 0", "train 0", "record 1", "save 0"]),
        (loops.evaluate_only, {"mode": "eval"}, ["evaluate 0", "record 0"]),
    ],
)
def test_the_order_of_things(loop: loops.Loop, flags: dict[str, Any], log: list[str]) -> None:
    run, diary = run_of(Cluster(), StopSignal(), **flags)
    loop(run)
    assert diary.log[: len(log)] == log
    if loop is loops.on_policy:
        assert {"perf/step_time_s", "perf/tokens_per_s", "perf/time_train_s", "eval/x/reward"} <= set(diary.rows[1])
    if loop is loops.sft:
        assert {"perf/step_time_s", "perf/tokens_per_s", "eval/x/loss"} <= set(diary.rows[1])
    if loop is loops.reject_sampling:  # weights are pushed once, and the first row says so
        assert "sync/version" in diary.rows[1] and "sync/version" not in diary.rows[2]
        assert diary.lines[-1] == "accepted 4 of 6 samples: accepted.jsonl"
