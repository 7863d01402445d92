"""Group-normalised advantages against a loop, group by group, in float64."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from fusionrl.algorithms.groups import SampleBatch
from tests.algorithms.group_stages import GROUP_STAGES

NAMES = ["grpo", "dr_grpo"]


def normalised(name, rewards, groups):
    return GROUP_STAGES[name](SampleBatch(rewards, groups))


@pytest.mark.parametrize("name", NAMES)
def test_equals_a_loop_over_groups(name):
    random = np.random.default_rng(0)
    groups = random.permutation(np.repeat([7, 3, 11, 2], [4, 2, 5, 8]))
    rewards = random.normal(size=groups.size).astype(np.float32)
    got = normalised(name, rewards, groups)
    for i in range(groups.size):
        own = [float(r) for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        want = float(rewards[i]) - statistics.fmean(own)
        if name == "grpo":
            want /= statistics.stdev(own) + 1e-6
        assert got[i] == pytest.approx(want, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_groups_that_say_nothing_get_exactly_zero(name):
    # 0.1 three times: its mean is not 0.1 in floating point.
    rewards = np.array([0.1, 0.1, 0.1, 5.0, 1.0, 0.0])
    got = normalised(name, rewards, np.array([0, 0, 0, 1, 2, 2]))
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] > 0 > got[5]


@pytest.mark.parametrize("name", NAMES)
def test_of_nothing_is_nothing(name):
    assert normalised(name, np.zeros(0), np.zeros(0, dtype=int)).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_refuses_what_is_no_reward(name):
    with pytest.raises(ValueError, match="reward nan of sample 1 is not finite"):
        normalised(name, np.array([1.0, np.nan]), np.array([0, 0]))
    with pytest.raises(ValueError, match="two equal 1-d shapes"):
        normalised(name, np.zeros(3), np.zeros(2))
