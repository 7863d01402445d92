"""Messages about a size that does not divide name sizes that do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.config.divisors import SHOWN, dividing, divisors
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.plan import plan_errors
from tests.plan.shapes import SMALL

MODEL: dict[str, Any] = SMALL | {"model_type": "qwen3_moe", "num_hidden_layers": 12, "intermediate_size": 96}
MODEL |= {"num_attention_heads": 24, "num_key_value_heads": 12, "vocab_size": 101}
MODEL |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
SIZES = (
    *("tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"),
    *("rollout_num_gpus_per_engine", "global_batch_size", "num_steps_per_rollout"),
)


def test_divisors() -> None:
    for count in (*range(1, 61), 97, 1936):
        assert divisors(count) == [size for size in range(1, count + 1) if count % size == 0]


def test_the_nearest_are_named() -> None:
    assert dividing(12, 5) == "sizes that divide 12: 1, 2, 3, 4, 6 and 12"
    assert dividing(7, 2, at_least=2) == "sizes that divide 7: 7"
    assert dividing(8, 3, at_least=3, at_most=3) == "sizes that divide 8: none"
    shown = [int(size) for size in re.findall(r"\d+", dividing(5040, 64).partition(": ")[2])]
    assert len(shown) == SHOWN and all(5040 % size == 0 for size in shown) and min(shown) > 40


@pytest.mark.parametrize(
    ("flags", "size", "fitting"),
    [
        ({"tensor_model_parallel_size": 5, "actor_num_gpus_per_node": 5}, "tensor-model-parallel-size 5", 12),
        ({"expert_model_parallel_size": 4, "actor_num_gpus_per_node": 4}, "expert-model-parallel-size 4", 6),
        ({"pipeline_model_parallel_size": 5, "actor_num_gpus_per_node": 5}, "pipeline-model-parallel-size 5", 12),
        ({"tensor_model_parallel_size": 3, "actor_num_gpus_per_node": 8}, "tp 3 × pp 1 × cp 1", 8),
        ({"expert_model_parallel_size": 3, "actor_num_gpus_per_node": 8}, "etp 1 × ep 3 × pp 1", 8),
        ({"rollout_num_gpus": 9, "rollout_num_gpus_per_engine": 2}, "rollout-num-gpus-per-engine 2", 9),
        ({"rollout_batch_size": 6, "global_batch_size": 4}, "global-batch-size 4", 6),
        ({"rollout_batch_size": 6, "num_steps_per_rollout": 4}, "num-steps-per-rollout 4", 6),
    ],
)
def test_what_is_named_would_do(flags: dict[str, int], size: str, fitting: int) -> None:
    """Every message about a size ends in those that fit, and with each of them the message is gone."""
    found = [error for error in plan_errors(Config.from_flat(flags), 0, shape_from_hf_config(MODEL)) if size in error]
    assert found
    names = re.search(rf"sizes that divide (?:{fitting}|all that it splits): ([\d, and]+)", found[0])
    assert names is not None, found
    field = next(name for name in flags if name in SIZES)
    for text in re.findall(r"\d+", names[1]):
        again = plan_errors(Config.from_flat(flags | {field: int(text)}), 0, shape_from_hf_config(MODEL))
        assert not any(names[0].partition(":")[0] + ":" in error for error in again), (text, again)
