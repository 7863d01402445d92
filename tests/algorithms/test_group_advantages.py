"""Advantages of whole samples, each against its paper's formula in plain loops over float64."""

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from fusionrl.algorithms.stages import SampleBatch, leave_one_out
from tests.algorithms.group_stages import GROUP_STAGES

SIZES = [4, 1, 2, 5, 8]


def batch(seed: int, rewards: np.ndarray | None = None, k: int = 1) -> SampleBatch:
    """Groups of unlike sizes whose members are strewn over the rollout."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([7, 3, 11, 2, 9], SIZES))
    n = groups.size
    drawn = rng.normal(size=n) if rewards is None else rewards
    return SampleBatch(drawn, groups, rng.integers(0, 900, n), rng.normal(size=n), k)


def members(of: SampleBatch, i: int) -> list[int]:
    return [j for j, g in enumerate(of.group_index) if g == of.group_index[i]]


def grpo(of: SampleBatch, i: int, group: list[int]) -> float:
    rewards = [float(of.rewards[j]) for j in group]
    return (rewards[group.index(i)] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def centered(of: SampleBatch, i: int, group: list[int]) -> float:
    return float(of.rewards[i]) - statistics.fmean(float(of.rewards[j]) for j in group)


def rloo(of: SampleBatch, i: int, group: list[int]) -> float:
    return float(of.rewards[i]) - statistics.fmean(float(of.rewards[j]) for j in group if j != i)


def opo(of: SampleBatch, i: int, group: list[int]) -> float:
    assert of.lengths is not None
    total = sum(int(of.lengths[j]) for j in group)
    return float(of.rewards[i]) - sum(int(of.lengths[j]) * float(of.rewards[j]) for j in group) / total


FORMULAS = {"grpo": grpo, "dr_grpo": centered, "rloo": rloo, "opo": opo}
ELSEWHERE = {"pass_at_k", "remax"}  # in tests of their own, below


def test_every_group_stage_has_a_formula_here() -> None:
    stages = {stage: name for name, stage in GROUP_STAGES.items()}
    known = {GROUP_STAGES[name] for name in [*FORMULAS, *ELSEWHERE]}
    missing = [name for stage, name in stages.items() if stage not in known]
    assert not missing, f"write {missing} as a loop over one group, and add it to FORMULAS"


@pytest.mark.parametrize(("name", "formula"), FORMULAS.items())
def test_equals_its_formula_in_loops(name: str, formula: Callable[[SampleBatch, int, list[int]], float]) -> None:
    of = batch(0)
    got = GROUP_STAGES[name](of)
    for i in range(of.rewards.size):
        group = members(of, i)
        want = formula(of, i, group) if len(group) > 1 else 0.0
        assert got[i] == pytest.approx(want, rel=1e-12, abs=1e-14), (i, group)


def test_remax_takes_the_greedy_answers_reward() -> None:
    of = batch(1)
    assert of.baselines is not None
    assert GROUP_STAGES["remax"](of).tolist() == [r - b for r, b in zip(of.rewards, of.baselines, strict=True)]


@pytest.mark.parametrize("wrong", [0.0, -1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_teams(k: int, wrong: float) -> None:
    right = np.random.default_rng(k).random(sum(SIZES)) < 0.4
    of = batch(2, np.where(right, 1.0, wrong), k)
    got = GROUP_STAGES["pass_at_k"](of)
    spoke = 0
    for i in range(right.size):
        group = members(of, i)
        teams = list(itertools.combinations(group, k))
        scores = [float(any(right[j] for j in team)) for team in teams]
        want = 0.0
        if len(set(scores)) == 2:
            mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
            want = statistics.fmean((s - mean) / deviation for s, team in zip(scores, teams, strict=True) if i in team)
            spoke += 1
        assert got[i] == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert spoke >= 5


def test_leave_one_out_leaves_out_samples_without_a_value() -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0, 5.0, np.nan])
    assert leave_one_out(values, np.array([4, 4, 4, 4, 8, 9])).tolist() == [4.0, 3.5, 3.0, 1.5, 5.0, 0.0]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("opo", {}, "OPO weighs 2 rewards by their samples' lengths"),
        ("opo", {"lengths": np.array([3, -1])}, "lengths >= 0"),
        ("remax", {}, "ReMax needs the reward of a greedy answer for each of 2 samples"),
        ("remax", {"baselines": np.array([0.0, np.nan])}, "greedy answer's reward nan for sample 1"),
        ("pass_at_k", {"k": 3}, "pass@3 advantages of groups of at most 2 samples.*--n-samples-per-prompt"),
        ("pass_at_k", {"k": 0}, "pass@0"),
        ("pass_at_k", {"rewards": np.array([1.0, 0.5])}, "reward 0.5 of sample 1: pass@k takes 1"),
        ("grpo", {"rewards": np.array([1.0, np.inf])}, "reward inf of sample 1 is not finite"),
        ("rloo", {"rewards": np.zeros(3)}, "two equal 1-d shapes"),
    ],
)
def test_refuses_what_it_cannot_use(name: str, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GROUP_STAGES[name](SampleBatch(**{"rewards": np.array([1.0, 0.0]), "group_index": np.zeros(2, int)} | given))


@pytest.mark.parametrize("name", sorted(GROUP_STAGES))
def test_a_sample_without_a_reward_is_in_no_mean_and_no_deviation(name: str) -> None:
    """The others of its group fare as if it had not been asked for; it is given a 0, which is no judgement."""
    rng = np.random.default_rng(4)
    groups, scored = np.repeat([5, 8, 2], 4), rng.permutation([True] * 9 + [False] * 3)
    rewards = np.where(scored, rng.integers(0, 2, 12).astype(float), 0.0)
    lengths, baselines = rng.integers(1, 90, 12), rng.normal(size=12)
    found = GROUP_STAGES[name](SampleBatch(rewards, groups, lengths, baselines, 2, scored))
    own = (rewards[scored], groups[scored], lengths[scored], baselines[scored])
    assert found[scored] == pytest.approx(GROUP_STAGES[name](SampleBatch(*own, 2)))
    if name != "remax":
        assert not found[~scored].any()


def test_pass_at_k_where_every_group_has_lost_a_sample() -> None:
    """The flags fit: that is no user's mistake, and nothing is learnt of such a group."""
    scored = np.array([True, False, True, False])
    lost = SampleBatch(np.array([1.0, 0.0, 0.0, 0.0]), np.array([0, 0, 1, 1]), k=2, scored=scored)
    assert not GROUP_STAGES["pass_at_k"](lost).any()
