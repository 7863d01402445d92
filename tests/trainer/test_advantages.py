"""Advantages in the trainers: the same at every layout, and those of the formulas."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.test_parallel import assert_same, history
from tests.trainer.trainer_worker import Samples, config_of

PLUS_PLUS = {
    "advantage_estimator": "reinforce_plus_plus",
    "kl_coef": 0.2,
    "gamma": 0.9,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_coef_type": "k2",
}


@pytest.mark.parametrize(
    ("values", "sizes"), [(PLUS_PLUS, {}), (PLUS_PLUS, {"cp": 2}), ({"normalize_advantages": True}, {"pp": 2})], ids=str
)
def test_no_layout_changes_them(workers, hf, values, sizes):
    folder, _ = hf("llama", True)
    samples = Samples(7, seed=51, share=2)
    one = history(workers, folder, samples, TrainerLayout(1), steps=2, **values)
    assert_same(history(workers, folder, samples, TrainerLayout(2, **sizes), micro=2, steps=2, **values), one, 2e-6)


def test_reinforce_plus_plus_by_the_formula(workers, hf):
    """Discounted returns of score and KL price, whitened over the batch, by loops in float64."""
    folder, _ = hf("llama", True)
    samples = Samples(5, seed=52)
    workers.start(config_of(folder, **PLUS_PLUS, lr=0.05), TrainerLayout(1))
    workers.train(samples.shards(), TrainerLayout(1), 0)  # so that policy and reference differ
    (shard,) = samples.shards()
    policy, reference = (workers.call("score", shard, name)[0] for name in (None, "ref"))
    returns: list[list[float]] = []
    for i in range(len(samples)):
        trained = np.flatnonzero(samples.mask[i])
        rewards = [-0.2 * 0.5 * (float(policy[i][t]) - float(reference[i][t])) ** 2 for t in trained]
        rewards[-1] += float(samples.rewards[i])
        back: list[float] = []
        for reward in reversed(rewards):
            back.append(reward + 0.9 * (back[-1] if back else 0.0))
        returns.append(back[::-1])
    flat = np.concatenate(returns)
    wanted = (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
    got, metrics = workers.run(advantages_of, shard)[0]
    assert np.abs(got[shard.fields["loss_mask"] > 0] - wanted).max() < 2e-6
    assert np.all(got[shard.fields["loss_mask"] == 0] == 0)
    gap = [(p - r)[m > 0] for p, r, m in zip(policy, reference, samples.mask, strict=True)]
    assert metrics["kl"] == pytest.approx(float(np.mean(0.5 * np.concatenate(gap) ** 2)), rel=1e-4)
    assert metrics["kl_excluded"] == 0.0


def advantages_of(actor, shard):
    """The shard's advantages as the trainer prepares them, and the metrics of that."""
    from fusionrl.trainer.shard_pull import pull

    prepared = actor._prepare(1, pull(shard))
    return prepared.shard.fields["advantages"], prepared.metrics
