"""Optimizer steps since a token was sampled, against a count token by token; and the versions that reach a shard."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.buffer.staleness import StepStaleness
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.plan.balance import Balance, SequenceCost
from fusionrl.plan.batch import BatchPlan
from tests.plan.shards import build_shards

NUM_STEPS, SIZE = 2, 4  # steps of the rollout; samples of a step


def samples() -> list[Sample]:
    """Eight samples of three tokens; the second one's versions are not known, nor one token of the third."""
    versions = [[5, 5, 6], None, [6, -1, 6], [4, 4, 4], [6, 6, 6], [5, 6, 6], [6, 6, 6], [3, 6, 6]]
    return [
        Sample(index=i, group_index=i, tokens=[1, 2, 3, 4], response_length=3, loss_mask=mask, weight_versions=known)
        for i, (known, mask) in enumerate(zip(versions, [[1, 1, 1]] * 7 + [[0, 1, 1]], strict=True))
    ]


def shards(dp_size: int = 2) -> list[TrainShard]:
    plan = BatchPlan(SIZE * NUM_STEPS, 1, NUM_STEPS, SIZE, dp_size)
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 200, 2)
    made, rewards = samples(), [0.0] * SIZE * NUM_STEPS
    return build_shards(made, rewards, rewards, plan, balance, rollout_id=6, weight_version=6)


def count(rollout_id: int, **options: int) -> dict[str, float]:
    since = StepStaleness(rollout_id, **options)
    for shard in shards():
        since.add(shard)
    return since.metrics()


def test_every_token_brings_its_version_into_the_shard() -> None:
    """Where one sample has none, the others keep theirs, and its own are unknown."""
    known = {
        int(index): list(versions)
        for shard in shards()
        for index, versions in zip(shard.fields["sample_index"], shard.split("weight_versions"), strict=True)
    }
    assert known[0] == [5, 5, 6] and known[1] == [-1, -1, -1] and known[2] == [6, -1, 6]
    assert shards()[0].fields["weight_versions"].dtype == np.int32


def test_steps_of_former_rollouts_and_of_this_one() -> None:
    """Rollout 6 in two steps: version 6 is 0 old in the first, 1 in the second; each version before is two more."""
    ages = []
    for i, sample in enumerate(samples()):
        mask = [0, 1, 1] if i == 7 else [1, 1, 1]
        for version, counts in zip(sample.weight_versions or [], mask, strict=False):
            if counts and version >= 0:
                ages.append((6 - int(version)) * NUM_STEPS + i // SIZE)
    found = count(6)
    assert found["rollout/steps_since_sampled/mean"] == pytest.approx(np.mean(ages))
    assert found["rollout/steps_since_sampled/max"] == max(ages) == 4


def test_rollouts_that_train_a_critic_alone_move_nothing() -> None:
    assert count(6, num_untrained=7) == {}
    assert count(6, num_untrained=6)["rollout/steps_since_sampled/max"] == 1
