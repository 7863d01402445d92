"""Which loop runs a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.pipelines import AVAILABLE
from fusionrl.driver import loops


def test_the_pipelines_that_pass_the_checks_are_those_that_run() -> None:
    assert tuple(loops.PIPELINES) == AVAILABLE


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
