"""The bound on staleness at the optimizer: what the Buffer could not see is not trained either."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.buffer.staleness import check_bound
from fusionrl.config.hooks import HookError
from fusionrl.data.convert import samples_of
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.balance import Balance, SequenceCost
from fusionrl.plan.batch import BatchPlan
from fusionrl.trainer.staleness_bound import check_staleness
from tests.plan.shards import build_shards
from tests.trainer.trainer_worker import Failed, Samples, config_of

KNOBS = Knobs(groups_per_fetch=4, max_staleness=2, lead=0.5)


def shard_of(versions: list[list[int]], masks: list[list[int]] | None = None) -> TrainShard:
    samples = [
        Sample(
            index=10 + i,
            group_index=i // 2,
            tokens=[1, 2, 3, 4, 5],
            response_length=3,
            loss_mask=[1, 1, 1] if masks is None else masks[i],
            rollout_log_probs=[-1.0] * 3,
            weight_versions=own,
        )
        for i, own in enumerate(versions)
    ]
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 200, 2)
    plan, rewards = BatchPlan(len(samples), 1, 1, len(samples), 1), [0.0] * len(samples)
    return build_shards(samples, rewards, rewards, plan, balance, rollout_id=7)[0]


def check(shard: TrainShard, rollout_id: int = 7, knobs: Knobs = KNOBS) -> None:
    for step in shard.steps:
        check_staleness(shard, step, rollout_id, knobs)


def test_as_old_as_the_bound_is_trained_and_one_older_is_not() -> None:
    check(shard_of([[5, 6, 7], [7, 7, 7], [5, 5, 5], [-1, -1, 7]]))
    with pytest.raises(
        HookError, match=r"sample 13 of prompt 1 has token 1 of its response from version 3.*4 versions"
    ):
        check(shard_of([[5, 6, 7], [7, 7, 7], [5, 5, 5], [4, 3, 7]]))


def test_tokens_that_are_not_trained_may_be_older() -> None:
    check(shard_of([[0, 6, 7], [7, 7, 7]], [[0, 1, 1], [1, 1, 1]]))


def test_versions_are_pushes_not_rollouts() -> None:
    """With a push after four rollouts, rollout 7 is of the second version, and so are tokens named 4 to 7."""
    stream = Knobs(groups_per_fetch=4, fetches_per_push=4)
    check(shard_of([[4, 4, 4], [4, 4, 4]]), knobs=stream)
    with pytest.raises(HookError, match="1 versions later"):
        check(shard_of([[4, 4, 4], [4, 0, 4]]), knobs=stream)


def test_a_token_that_passes_the_buffer_is_refused_before_the_step(workers, hf) -> None:
    """A user's conversion runs after the Buffer's check; it brings other versions than those that were checked."""
    random = Samples(4, seed=3)
    group = [
        Sample(index=i, group_index=20, tokens=random.tokens[i], response_length=int(n), weight_versions=[7] * int(n))
        for i, n in enumerate(random.response)
    ]
    check_bound([group], 7, KNOBS)
    data = {
        "tokens": [sample.tokens for sample in group],
        "response_lengths": [sample.response_length for sample in group],
        "rewards": random.rewards.tolist(),
        "sample_indices": [sample.index for sample in group],
        "rollout_log_probs": random.log_probs,
        "weight_versions": [[7] * sample.response_length for sample in group],
    }
    data["weight_versions"][2][-1] = 3
    samples, rewards, raw, _ = samples_of(data, group, "--custom-convert-samples-to-train-data-path")
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 4096, 2)
    (shard,) = build_shards(samples, rewards, raw, BatchPlan(4, 1, 1, 4, 1), balance, rollout_id=7)
    shard.fields["loss_mask"] = np.ones_like(shard.fields["loss_mask"])
    folder, _ = hf("llama", True)
    workers.start(config_of(folder, pipeline="async", rollout_batch_size=4))
    before = workers.call("state_hashes")
    named = r"--max-staleness 2: sample 2 of prompt 20 has token \d+ of its response from version 3, and rollout 7"
    with pytest.raises(Failed, match=named) as caught:
        workers.train([shard], rollout_id=7)
    assert caught.value.kind == "HookError" and "the samples that it was at: 2" in caught.value.message
    assert workers.call("state_hashes") == before
    workers.start(config_of(folder))  # one rollout after the other has no bound: a resumed part may be of any age
    assert workers.train([shard], rollout_id=7)["train/skipped"] == 0
