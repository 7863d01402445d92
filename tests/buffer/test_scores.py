"""Rewards of a rollout's samples, as they are compared with the baseline of their prompt."""

from __future__ import annotations

import pytest

from fusionrl.buffer.scores import group_advantages
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample

REMAX = Config.from_flat({"advantage_estimator": "remax"})


def test_a_failed_sample_needs_no_greedy_answer() -> None:
    samples = [
        Sample(group_index=0, status=Sample.Status.COMPLETED, reward=1.0, baseline_reward=0.25),
        Sample(group_index=1, status=Sample.Status.FAILED, reward=1.0),
    ]
    assert group_advantages(samples, [1.0, 1.0], REMAX)[0] == 0.75
    samples[1].status = Sample.Status.COMPLETED
    with pytest.raises(ValueError, match="has no baseline_reward"):
        group_advantages(samples, [1.0, 1.0], REMAX)
