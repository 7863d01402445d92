"""On-policy distillation: the teacher's pull on each token, whoever computed its log-probs."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer import hf_models
from tests.trainer.test_advantages import advantages_of
from tests.trainer.test_parallel import assert_same, history
from tests.trainer.trainer_worker import Samples, config_of


def test_a_teacher_of_the_trainers_own(workers, hf, tmp_path):
    """Advantages are those of the formula; the same at every layout; and as if an engine had said the log-probs."""
    folder, _ = hf("llama", True)
    hf_models.make(tmp_path / "teacher", "llama", True, seed=9)
    samples = Samples(5, seed=81, share=2)
    plain = {"use_kl_loss": False, "kl_loss_coef": 0.0, "use_opd": True, "opd_kl_coef": 0.5}
    own = plain | {"opd_type": "megatron", "opd_teacher_load": str(tmp_path / "teacher")}
    workers.start(config_of(folder, **own), TrainerLayout(1))
    (shard,) = samples.shards()
    student, teacher = (workers.call("score", shard, name)[0] for name in (None, "teacher"))
    assert np.abs(np.concatenate(student) - np.concatenate(teacher)).max() > 0.01
    got, metrics = workers.run(advantages_of, shard)[0]
    gap = np.concatenate(student) - np.concatenate(teacher)
    trained = shard.fields["loss_mask"] > 0
    rewards = np.repeat(samples.rewards, samples.response)
    assert np.abs((got - (rewards - 0.5 * gap))[trained]).max() < 1e-5
    assert not got[~trained].any()
    assert metrics["opd_kl"] == pytest.approx(gap[trained].mean(), rel=1e-4)

    one = history(workers, folder, samples, TrainerLayout(1), **own)
    assert_same(history(workers, folder, samples, TrainerLayout(2, pp=2), **own), one, 3e-6)
    flat = np.concatenate(teacher)
    original = samples.shard

    def with_teacher(steps, counts):
        made = original(steps, counts)
        ends = np.cumsum(samples.response)
        parts = [flat[ends[i] - samples.response[i] : ends[i]] for i in made.fields["sample_index"]]
        made.fields["teacher_log_probs"] = np.concatenate(parts).astype(np.float32)
        return made

    samples.shard = with_teacher
    by_engine = history(workers, folder, samples, TrainerLayout(2), micro=2, **plain)
    assert_same(by_engine, one, 3e-6)
