"""Train shards: ragged fields join and split again, and a field of a wrong size is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.data.train_batch import FIELDS, TrainShard, flat_field


def shard(**changes: np.ndarray) -> TrainShard:
    fields = {
        "tokens": flat_field("tokens", [[1, 2, 3], [4, 5]]),
        "loss_mask": flat_field("loss_mask", [[1, 0], []]),
        "rewards": flat_field("rewards", [0.5, 1.0]),
        "raw_rewards": flat_field("raw_rewards", [0.5, 1.0]),
        "sample_index": flat_field("sample_index", [7, 8]),
        "group_index": flat_field("group_index", [0, 0]),
        "truncated": flat_field("truncated", [False, True]),
    }
    return TrainShard(0, np.array([3, 2]), np.array([2, 0]), fields | changes, [])


def test_fields_split_into_samples() -> None:
    made = shard()
    assert [part.tolist() for part in made.split("tokens")] == [[1, 2, 3], [4, 5]]
    assert [part.tolist() for part in made.split("loss_mask")] == [[1, 0], []]
    assert [part.tolist() for part in made.split("rewards")] == [[0.5], [1.0]]
    assert all(made.fields[name].dtype == FIELDS[name].dtype for name in made.fields)


def test_a_field_of_a_wrong_size_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="'loss_mask': shape"):
        shard(loss_mask=np.zeros(5))


def test_values_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="train batch field 'rewards'"):
        flat_field("rewards", ["high", 1.0])
    with pytest.raises(ValueError, match="train batch field 'tokens'"):
        flat_field("tokens", [[1, "x"]])
