"""Advantages in the trainers: the same at every layout, and those of the formulas."""

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.test_parallel import assert_as_on_one_rank, assert_same, history
from tests.trainer.trainer_worker import Samples, advantages, config_of

NO_KL = {"use_kl_loss": False, "kl_loss_coef": 0.0}
PLUS_PLUS = NO_KL | {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.2, "gamma": 0.9, "kl_coef_type": "k2"}


@pytest.mark.parametrize(
    ("values", "sizes"), [(PLUS_PLUS, {}), (PLUS_PLUS, {"cp": 2}), ({"normalize_advantages": True}, {"pp": 2})], ids=str
)
def test_no_layout_changes_them(workers, hf, values, sizes):
    folder, samples = hf("llama", True)[0], Samples(7, seed=51, share=2)
    assert_as_on_one_rank(workers, folder, samples, TrainerLayout(2, **sizes), 2e-6, micro=2, steps=2, **values)


def test_reinforce_plus_plus_by_the_formula(workers, hf):
    """Discounted returns of score and KL price, whitened over the batch, by loops in float64."""
    samples = Samples(5, seed=52)
    (shard,) = samples.shards()
    workers.start(config_of(hf("llama", True)[0], **PLUS_PLUS, lr=0.05))
    workers.train([shard])  # so that policy and reference differ
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
    _, got, metrics = workers.run(advantages, shard)[0]
    assert np.abs(got[shard.fields["loss_mask"] > 0] - wanted).max() < 2e-6
    assert np.all(got[shard.fields["loss_mask"] == 0] == 0)
    gap = [(p - r)[m > 0] for p, r, m in zip(policy, reference, samples.mask, strict=True)]
    assert metrics["kl"] == pytest.approx(float(np.mean(0.5 * np.concatenate(gap) ** 2)), rel=1e-4)
    assert metrics["kl_excluded"] == 0.0


def test_a_teacher_of_the_trainers_own(workers, hf):
    """Advantages are those of the formula; the same at every layout; and as if an engine had said the log-probs."""
    folder, _ = hf("llama", True)
    samples = Samples(5, seed=81, share=2)
    plain = NO_KL | {"use_opd": True, "opd_kl_coef": 0.5}
    own = plain | {"opd_type": "megatron", "opd_teacher_load": str(hf("llama", True, seed=9)[0])}
    workers.start(config_of(folder, **own), TrainerLayout(1))
    (shard,) = samples.shards()
    student, teacher = (np.concatenate(workers.call("score", shard, name)[0]) for name in (None, "teacher"))
    gap, trained = student - teacher, shard.fields["loss_mask"] > 0
    assert np.abs(gap).max() > 0.01
    _, got, metrics = workers.run(advantages, shard)[0]
    rewards = np.repeat(samples.rewards, samples.response)
    assert np.abs((got - (rewards - 0.5 * gap))[trained]).max() < 1e-5
    assert not got[~trained].any()
    assert metrics["opd_kl"] == pytest.approx(gap[trained].mean(), rel=1e-4)

    one = assert_as_on_one_rank(workers, folder, samples, TrainerLayout(2, pp=2), 3e-6, **own)
    shards, parts = samples.shards, np.split(teacher, np.cumsum(samples.response)[:-1])

    def with_teacher(*args):
        made = shards(*args)
        for shard in made:
            shard.fields["teacher_log_probs"] = np.concatenate([parts[i] for i in shard.fields["sample_index"]])
        return made

    samples.shards = with_teacher
    assert_same(history(workers, folder, samples, TrainerLayout(2), micro=2, **plain), one, 3e-6)
