"""--in-process is refused by name where a run needs several trainers or Ray, with the alternative."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.checks.modes import in_process_errors
from fusionrl.config.config import Config


def errors(**values: Any) -> list[str]:
    return in_process_errors(Config.from_flat(values))


def test_one_rank_without_ray_is_fine() -> None:
    assert errors(in_process=True, pdb=True) == errors(actor_num_gpus_per_node=8) == []


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"actor_num_gpus_per_node": 2}, "one trainer rank, not 2; give --actor-num-nodes 1"),
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
    is_alone = "actor_num_gpus_per_node" in values or "pipeline" in values
    assert is_alone == ("--save-debug-rollout-data" in error), "its rollouts may be replayed in one process"
    assert errors(**values) == []
