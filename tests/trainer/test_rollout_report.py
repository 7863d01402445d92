"""The stage report: metrics under the role's name, and values of single samples where a rank answers for them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fusionrl.trainer.rollout_report import report
from fusionrl.trainer.stages import Prepared, StepsTaken
from fusionrl.trainer.step_report import StepReport
from tests.trainer.trainer_worker import Samples


def step(loss: float, tokens: float, clipped: float, skipped: float = 0.0) -> StepReport:
    sums = {"tokens": tokens, "clip_fraction": clipped}
    return StepReport({"loss": loss}, sums, {"sequences": 2.0}, numbers={"skipped": skipped})


def loss_of(mode: str = "rl", use_rollout_log_probs: bool = False):
    return SimpleNamespace(mode=mode, use_rollout_log_probs=use_rollout_log_probs)


def prepared_of(samples: Samples, **metrics: float) -> Prepared:
    (shard,) = samples.shards()
    shard.fields["advantages"] = np.repeat(shard.fields["rewards"], shard.response_lengths)
    return Prepared(shard, metrics=metrics)


@pytest.mark.parametrize(("engines_are_old", "clipped"), [(False, 4 / 30), (True, 5 / 40)])
def test_the_first_step_counts_for_ratios_only_against_the_engine(engines_are_old, clipped) -> None:
    taken = StepsTaken([step(1.0, 10.0, 1.0), step(3.0, 30.0, 4.0, skipped=1.0)])
    loss = loss_of(use_rollout_log_probs=engines_are_old)
    metrics = report(prepared_of(Samples(3, seed=1), kl=0.25), taken, loss, prefix="critic").metrics
    assert metrics["critic/loss"] == 2.0 and metrics["critic/skipped"] == taken.num_skipped == 1
    assert metrics["critic/clip_fraction"] == pytest.approx(clipped)
    assert metrics["critic/kl"] == 0.25, "metrics of the stages before"
    assert all(name.startswith("critic/") for name in metrics)


def test_values_of_samples_where_the_rank_answers_for_them() -> None:
    samples = Samples(3, seed=2)
    prepared, taken = prepared_of(samples), StepsTaken([step(1.0, 10.0, 0.0)], np.array([0.5, np.nan, 0.25]))
    assert report(prepared, taken, loss_of(), prefix="train").samples == {}
    assert report(prepared, taken, loss_of("sft"), prefix="train", with_samples=True).samples == {}
    found = report(prepared, taken, loss_of(), prefix="train", with_samples=True).samples
    assert [found[i].get("mismatch") for i in range(3)] == [0.5, None, 0.25]
    for i, mask in enumerate(samples.mask):
        assert found[i]["num_trained"] == int(mask.sum())
        assert found[i]["trained_reward"] == pytest.approx(samples.rewards[i])
