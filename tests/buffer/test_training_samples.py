"""Pairs of answers for DPO."""

from __future__ import annotations

from fusionrl.buffer.training_samples import best_and_worst
from fusionrl.data.sample import Sample, Status


def test_the_first_best_and_the_first_worst_of_each_group() -> None:
    groups = [0, 0, 0, 1, 1, 2, 2, 3]
    rewards = [0.5, 1.0, 0.0, 1.0, 1.0, 2.0, -1.0, 5.0]
    samples = [Sample(index=i, group_index=group) for i, group in enumerate(groups)]
    assert best_and_worst(samples, rewards) == [(1, 2), (5, 6)], "equal rewards, and one alone, make no pair"


def test_who_is_not_trained_on_is_nobodys_partner() -> None:
    samples = [Sample(index=i, group_index=0) for i in range(4)]
    samples[0].remove_sample, samples[3].status = True, Status.FAILED
    assert best_and_worst(samples, [9.0, 1.0, 0.5, -9.0]) == [(1, 2)]
