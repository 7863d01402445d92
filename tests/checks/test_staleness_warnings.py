"""A loss that does not know of older weights is told before the run."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.checks.warnings import context_warnings, flag_warnings, staleness_warnings
from fusionrl.config.config import Config


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({"pipeline": "async"}, False),  # the loss corrects by default
        ({"pipeline": "async", "use_tis": False}, True),
        ({"pipeline": "async-partial", "max_staleness": 1, "use_tis": False}, True),
        ({"pipeline": "stream", "use_tis": False}, True),
        ({"pipeline": "async", "rejection_level": "sequence"}, True),  # leaves out, and weighs nothing
        ({"pipeline": "async", "policy_loss": "dpo"}, False),
        ({"pipeline": "stream", "update_weights_interval": 1}, False),
        ({"pipeline": "on-policy"}, False),
        ({"pipeline": "async", "use_tis": True}, False),
        ({"pipeline": "async", "use_rollout_logprobs": True}, False),
        ({"pipeline": "async", "custom_policy_loss_path": "mine.py:loss"}, False),
        ({"pipeline": "async", "mode": "sft"}, False),
        ({"pipeline": "async", "admission_lead": 9.0}, False),
    ],
)
def test_where_it_is_told(values: dict[str, Any], is_told: bool) -> None:
    found = staleness_warnings(Config.from_flat({"rollout_batch_size": 8, **values}))
    assert bool(found) == is_told
    assert not found or "--use-tis" in found[0]


@pytest.mark.parametrize("field", ["custom_tis_function_path", "custom_pg_loss_reducer_function_path"])
def test_a_function_that_may_sum_over_context_ranks(field: str) -> None:
    values = {field: "mine.py:f", "context_parallel_size": 2}
    (told,) = (text for text in flag_warnings(Config.from_flat(values)) if "context ranks" in text)
    assert told.startswith(f"--{field.replace('_', '-')} mine.py:f: with --context-parallel-size 2")
    assert context_warnings(Config.from_flat({field: "mine.py:f"})) == []
    assert context_warnings(Config.from_flat({"context_parallel_size": 2})) == []
    assert context_warnings(Config.from_flat({**values, "mode": "sft"})) == []
