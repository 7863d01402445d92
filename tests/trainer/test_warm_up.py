"""The warm-up: what the plan says of the first steps is what the trainers do."""

from __future__ import annotations

import itertools

import pytest

from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.lr_schedule import warm_up_notes
from tests.trainer.trainer_worker import Samples, config_of


@pytest.mark.parametrize("init", [0.0, 2e-4])
def test_the_first_steps_have_the_rates_of_the_plan(workers, hf, init):
    """With --lr-warmup-init 0 the first optimizer step changes no weight; with more than 0 it does."""
    layout = TrainerLayout(1)
    config = config_of(hf("qwen3", True)[0], lr_warmup_iters=2, lr_warmup_init=init)
    workers.start(config, layout)
    weights, rates = [workers.call("state_hashes")[0]["weights"]], []
    for rollout_id in range(4):
        metrics = workers.train(Samples(6, seed=rollout_id).shards(1, 1), layout, rollout_id)
        rates.append(metrics["train/lr"])
        weights.append(workers.call("state_hashes")[0]["weights"])
    assert rates == pytest.approx([init, (init + 1e-3) / 2, 1e-3, 1e-3])
    assert [after != before for before, after in itertools.pairwise(weights)] == [
        init > 0,
        True,
        True,
        True,
    ]
    (note,) = warm_up_notes(config, 4)
    assert note.startswith(f"learning rate {init:g} at optimizer step 1")
    assert ("changes no weights" in note) == (init == 0)
    assert "0.001 from step 3 on" in note
