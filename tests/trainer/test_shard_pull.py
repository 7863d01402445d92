"""The stage pull: a shard of its own, other trainers' columns in it, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.trainer.sample_columns import columns_of
from fusionrl.trainer.shard_pull import pull
from tests.trainer.trainer_worker import Samples


def test_what_is_added_stays_with_the_trainer() -> None:
    (shard,) = Samples(4, seed=1).shards()
    names = set(shard.fields)
    pulled = pull(shard)
    assert set(pulled.fields) == names and pulled.steps == shard.steps
    pulled.fields["advantages"] = np.zeros(int(shard.response_lengths.sum()), np.float32)
    assert set(shard.fields) == names


def test_columns_of_shards_that_are_cut_otherwise() -> None:
    samples = Samples(5, seed=2)
    parts = samples.shards(2)
    for shard in parts:
        shard.fields["values"] = shard.fields["rollout_log_probs"] * 2
        shard.fields["returns"] = shard.fields["loss_mask"] + 1
    (whole,) = samples.shards()
    pulled = pull(whole, [columns_of(shard, ("values", "returns")) for shard in parts])
    assert np.array_equal(pulled.fields["values"], whole.fields["rollout_log_probs"] * 2)
    assert np.array_equal(pulled.fields["returns"], whole.fields["loss_mask"] + 1)
    assert "values" not in whole.fields


def test_a_sample_that_nobody_gave_columns_for_is_an_error() -> None:
    samples = Samples(4, seed=3)
    first, _ = samples.shards(2)
    (whole,) = samples.shards()
    with pytest.raises(KeyError):
        pull(whole, [columns_of(first, ("rollout_log_probs",))])


def test_a_sample_without_a_prompt_is_named() -> None:
    (shard,) = Samples(4, seed=4).shards()
    shard.fields["sample_index"] = np.array([10, 11, 12, 13])
    shard.response_lengths[2] = shard.total_lengths[2]
    with pytest.raises(ValueError, match=r"sample 12 has \d+ tokens, all of them response"):
        pull(shard)
