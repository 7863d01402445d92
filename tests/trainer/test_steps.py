"""The stage steps: optimizer steps in order, their reports, and steps that change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.trainer_worker import Failed, Samples, config_of, poison_gradient


class Borders:
    """In place of `TrainHooks`: notes the steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def before_step(self, rollout_id: int, index: int, trained) -> None:
        self.steps.append((rollout_id, index))


def taken(actor, shard, rollout_id: int = 4, poisoned: bool = False):
    """(reports, mean differences, steps that hooks saw) of the stage on one rank."""
    from dataclasses import replace

    from fusionrl.trainer.micro_batches import Packing, pack_steps
    from fusionrl.trainer.shard_pull import pull
    from fusionrl.trainer.stages import Prepared
    from fusionrl.trainer.steps import take_steps

    if poisoned:
        poison_gradient(actor)
    own, hooks = pull(shard), Borders()
    own.fields["advantages"] = np.repeat(own.fields["rewards"], own.response_lengths)
    packed = pack_steps(Prepared(own), Packing(actor.batch_options, actor.layout))
    found = take_steps(packed, replace(actor.stepping, hooks=hooks), rollout_id)
    return found.reports, found.mean_differences, found.num_skipped, hooks.steps


@pytest.mark.parametrize("layout", [TrainerLayout(1), TrainerLayout(2, cp=2), TrainerLayout(2)], ids=str)
def test_a_report_for_each_step(workers, hf, layout):
    folder, _ = hf("llama", True)
    samples = Samples(6, seed=11)
    samples.mask[4][:] = 0.0
    workers.start(config_of(folder, lr=1e-2), layout)
    scores = workers.call("score", samples.shards()[0])[0]
    before = workers.call("state_hashes")
    shards = samples.shards(layout.dp, steps=2)
    args = [(taken, shards[layout.dp_rank(rank)]) for rank in range(layout.world_size)]
    everyone = workers.run_each(args)
    assert all(a["weights"] != b["weights"] for a, b in zip(before, workers.call("state_hashes"), strict=True))
    for rank, (reports, means, num_skipped, steps) in enumerate(everyone):
        assert steps == [(4, 0), (4, 1)] and num_skipped == 0
        assert [report.numbers["num_samples"] for report in reports] == [3, 3]
        assert [report.numbers["masked_samples"] for report in reports] == [0, 1]
        tokens = [samples.count(ids)[0] for ids in ([0, 1, 2], [3, 4, 5])]
        assert [report.numbers["num_tokens"] for report in reports] == tokens
        assert all(report.numbers["lr"] == 1e-2 and report.numbers["grad_norm"] > 0 for report in reports)
        # Only the first step's samples are compared with the engine: after it the weights are others.
        for index, mean in zip(shards[layout.dp_rank(rank)].fields["sample_index"], means, strict=True):
            if index > 2:
                assert np.isnan(mean)
            else:
                gaps = np.abs(scores[index] - samples.log_probs[index])[samples.mask[index] > 0]
                assert mean == pytest.approx(gaps.mean(), rel=1e-4)


def test_log_probs_of_before_are_compared_elsewhere(workers, hf):
    """Where the shard has them, `report` compares them itself."""
    folder, _ = hf("llama", True)
    (shard,) = Samples(4, seed=12).shards()
    shard.fields["log_probs"] = shard.fields["rollout_log_probs"] * shard.fields["loss_mask"]
    workers.start(config_of(folder))
    ((reports, means, _, _),) = workers.run(taken, shard)
    assert means is None and len(reports) == 1


def test_a_step_without_a_finite_gradient_changes_nothing(workers, hf):
    folder, _ = hf("llama", True)
    (shard,) = Samples(4, seed=13).shards(steps=2)
    workers.start(config_of(folder, max_skipped_steps=3))
    ((reports, _, num_skipped, _),) = workers.run(taken, shard, 0, True)
    assert num_skipped == 1 and [report.numbers["skipped"] for report in reports] == [1.0, 0.0]


def test_too_many_such_steps_end_the_run_and_name_the_samples(workers, hf):
    folder, _ = hf("llama", True)
    samples = Samples(4, seed=14, nan_reward=True)
    (shard,) = samples.shards()
    workers.start(config_of(folder, max_skipped_steps=2))
    before = workers.call("state_hashes")
    ((_, _, num_skipped, _),) = workers.run(taken, shard, 7)
    assert num_skipped == 1 and workers.call("state_hashes") == before
    with pytest.raises(Failed, match=r"step 8, optimizer step 1 of this rollout: skipped, the loss of sample 0 is not"):
        workers.run(taken, shard, 7)
