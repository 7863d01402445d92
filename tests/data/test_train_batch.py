"""Train shards, and what a user's conversion function returns: fields join and split; wrong sizes are refused."""

import math
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Status
from fusionrl.data.sample_json import samples_of
from fusionrl.data.train_batch import FIELDS, TrainShard, flat_field


def shard(**changes: np.ndarray) -> TrainShard:
    values = {"tokens": [[1, 2, 3], [4, 5]], "loss_mask": [[1, 0], []], "truncated": [False, True]}
    values |= {"rewards": [0.5, 1.0], "raw_rewards": [0.5, 1.0], "sample_index": [7, 8], "group_index": [0, 0]}
    fields = {name: flat_field(name, value) for name, value in values.items()}
    return TrainShard(0, np.array([3, 2]), np.array([2, 0]), fields | changes, [])


def test_fields_split_into_samples() -> None:
    made = shard()
    parts = {"tokens": [[1, 2, 3], [4, 5]], "loss_mask": [[1, 0], []], "rewards": [[0.5], [1.0]]}
    assert {name: [part.tolist() for part in made.split(name)] for name in parts} == parts
    assert all(made.fields[name].dtype == FIELDS[name].dtype for name in made.fields)


def test_a_field_of_a_wrong_size_and_values_that_are_no_numbers() -> None:
    with pytest.raises(AssertionError, match="'loss_mask': shape"):
        shard(loss_mask=np.zeros(5))
    for name, values in (("rewards", ["high", 1.0]), ("tokens", [[1, "x"]])):
        with pytest.raises(ValueError, match=f"train batch field '{name}'"):
            flat_field(name, values)


GOOD: dict[str, Any] = {"tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [1, 0]}


def test_columns_become_samples() -> None:
    samples, rewards, raw, extra = samples_of(GOOD | {"truncated": [0, 1], "mine": ["a", "b"]}, [], "--flag f")
    assert [s.response_length for s in samples] == [2, 1] and rewards == raw == [1.0, 0.0]
    assert [s.status for s in samples] == [Status.COMPLETED, Status.TRUNCATED]
    assert extra == {"mine": ["a", "b"]}
    assert samples[0].group_index != samples[1].group_index


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": [1.0, math.nan]}, r"--flag f: raw_reward\[1\] is nan; a reward must be a finite number"),
        ({"rewards": [math.inf, 0.0], "raw_reward": [1, 0]}, r"--flag f: rewards\[0\] is inf"),
        ({"rewards": [1.0]}, "--flag f: 'rewards' has 1 entries, 'tokens' has 2"),
    ],
    ids=str,
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samples_of(GOOD | changed, [], "--flag f")
