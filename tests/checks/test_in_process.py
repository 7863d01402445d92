"""--in-process is refused by name where a run needs several trainers or Ray, with the alternative."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.checks.modes import in_process_errors
from fusionrl.config.config import Config


def errors(**values: Any) -> list[str]:
    return in_process_errors(Config.from_flat(values))


def test_one_rank_without_ray_is_fine() -> None:
    assert errors(in_process=True) == [] and errors(in_process=True, pdb=True) == []
    assert errors(actor_num_gpus_per_node=8) == []


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"actor_num_gpus_per_node": 2}, "the flags ask for 2; give --actor-num-nodes 1"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo trains a critic"),
        ({"pipeline": "async"}, "--pipeline async generates while it trains"),
        ({"ray_address": "10.0.0.1:6379"}, "--ray-address needs other processes"),
        ({"async_save": True}, "--async-save needs other processes"),
        ({"use_fault_tolerance": True}, "--use-fault-tolerance needs other processes"),
        ({"dashboard": True}, "--dashboard needs other processes"),
        ({"eval_num_gpus": 1}, "--eval-num-gpus needs other processes"),
    ],
)
def test_what_it_cannot_do(values: dict[str, Any], part: str) -> None:
    (error,) = errors(in_process=True, **values)
    assert part in error
    assert errors(**values) == []


def test_a_run_of_several_ranks_is_told_to_replay() -> None:
    (error,) = errors(in_process=True, actor_num_gpus_per_node=4)
    assert "--save-debug-rollout-data" in error and "--load-debug-rollout-data" in error


def test_the_debugger_needs_one_process() -> None:
    assert errors(pdb=True) == ["--pdb needs --in-process: a debugger cannot open in other processes"]
