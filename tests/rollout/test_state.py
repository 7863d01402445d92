"""Whom a `GenerateState` speaks of where a rollout and an evaluation are open at once."""

from __future__ import annotations

import threading

from fusionrl.config.config import Config
from fusionrl.rollout.state import GenerateState, rollout_open


def test_an_evaluation_beside_a_rollout_that_stops_is_not_aborted() -> None:
    evaluation, rollout = Config().to_args(), Config().to_args()
    rollout.is_stopping = lambda: True
    begun, ended = threading.Event(), threading.Event()

    def roll_out() -> None:
        with rollout_open(rollout):
            begun.set()
            ended.wait(20)
            assert GenerateState(rollout).aborted

    with rollout_open(evaluation):
        thread = threading.Thread(target=roll_out)
        thread.start()
        assert begun.wait(20)
        found = GenerateState(evaluation).aborted
        ended.set()
        thread.join(20)
    assert not found
