"""Facts about a rollout: by estimator, whether equal rewards teach nothing; and what warnings count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.algorithms.groups import SampleBatch
from fusionrl.buffer.rollout_report import rollout_facts, teaches_nothing
from fusionrl.checks.algorithm import OF_GROUPS
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample, Status
from fusionrl.observe.advice import Glimpse

EQUAL = [0.0, 0.0, 1.0, 1.0]  # two groups of two: equal within, different between
ALL_ZERO, ALL_ONE, MIXED = [0.0] * 4, [1.0] * 4, [0.0, 1.0, 1.0, 1.0]


def samples_of(rewards: list[float], **fields: Any) -> list[Sample]:
    shared = {"tokens": [1, 2, 3], "response": "ab", "response_length": 2, "label": "x", "status": Status.COMPLETED}
    return [
        Sample(index=i, group_index=i // 2, prompt=f"p{i // 2}", reward=reward, **shared, **fields)
        for i, reward in enumerate(rewards)
    ]


def nothing(rewards: list[float], trained: list[float] | None = None, **flags: Any) -> bool:
    """`teaches_nothing` of rewards as the Buffer would hand them out under these flags."""
    config = Config.from_flat(flags)
    stage = ESTIMATORS[config.algorithm.advantage_estimator].group
    raw = config.algorithm.disable_rewards_normalization or config.algorithm.policy_loss == "dpo"
    if trained is None and stage is not None and not raw:
        groups = np.arange(4) // 2
        batch = SampleBatch(np.array(rewards), groups, lengths=np.array([2, 3, 2, 5]), baselines=np.full(4, 0.5))
        trained = stage(batch).tolist()
    return teaches_nothing(config, samples_of(rewards), trained or rewards, np.ones(4, bool))


@pytest.mark.parametrize("estimator", sorted(OF_GROUPS))
def test_estimators_that_compare_within_a_group(estimator: str) -> None:
    for rewards in (EQUAL, ALL_ZERO, ALL_ONE):
        assert nothing(rewards, advantage_estimator=estimator), rewards
    assert not nothing(MIXED, advantage_estimator=estimator)


def test_estimators_for_which_equal_rewards_teach() -> None:
    assert not nothing(ALL_ONE, advantage_estimator="remax"), "the greedy answer got 0.5"
    assert nothing(ALL_ONE, [0.0] * 4, advantage_estimator="remax"), "the greedy answer got the same"
    assert nothing(ALL_ONE, advantage_estimator="remax", normalize_advantages=True), "whitened, they are 0"
    assert not nothing(ALL_ZERO, advantage_estimator="ppo"), "the critic's values differ"
    assert not nothing(ALL_ZERO, advantage_estimator="prime"), "the process rewards do"
    assert nothing(ALL_ZERO, advantage_estimator="prime", prm_process_coef=0.0)
    assert not nothing(ALL_ZERO, use_opd=True), "the teacher does"


def test_reinforce_plus_plus_whitens_the_whole_rollout() -> None:
    name = {"advantage_estimator": "reinforce_plus_plus"}
    assert not nothing(EQUAL, **name), "the groups differ from each other"
    assert nothing(ALL_ONE, **name) and nothing(ALL_ZERO, **name)
    assert not nothing(ALL_ONE, **name, gamma=0.9), "a token is worth the less the further it is from the end"
    assert nothing(ALL_ZERO, **name, gamma=0.9)
    assert not nothing(ALL_ZERO, **name, kl_coef=0.1), "the price for KL differs"


def test_raw_rewards_as_advantages() -> None:
    raw = {"disable_rewards_normalization": True}
    assert nothing(ALL_ZERO, **raw)
    assert not nothing(ALL_ONE, **raw), "every token is made likelier"
    assert nothing(ALL_ONE, **raw, normalize_advantages=True)


def test_pairs() -> None:
    assert nothing(EQUAL, policy_loss="dpo", n_samples_per_prompt=2), "no pair"
    assert not nothing(MIXED, policy_loss="dpo", n_samples_per_prompt=2)


@pytest.mark.parametrize(
    "flags",
    [
        {"mode": "reject-sampling"},
        {"loss_type": "sft_loss"},
        {"custom_policy_loss_path": "m.f"},
        {"custom_convert_samples_to_train_data_path": "m.f"},
        {"custom_advantage_function_path": "m.f"},
        {"rollout_data_postprocess_path": "m.f"},
    ],
    ids=str,
)
def test_nothing_is_claimed_where_it_is_not_known(flags: dict[str, Any]) -> None:
    assert not nothing(ALL_ZERO, **flags)


def test_rewards_of_samples_that_are_not_trained_on_do_not_count() -> None:
    samples = samples_of(MIXED)
    trained = np.array([False, False, True, True])
    assert teaches_nothing(Config.from_flat({}), samples, [-0.7, 0.7, 0.0, 0.0], trained)
    assert not teaches_nothing(Config.from_flat({}), samples, [-0.7, 0.7, 0.0, 0.0], ~trained)
    assert teaches_nothing(Config.from_flat({}), samples, [-0.7, 0.7, 0.0, 0.0], np.zeros(4, bool))


def test_what_is_counted() -> None:
    samples = samples_of([0.0] * 8)
    samples[0].status = samples[1].status = Status.TRUNCATED
    samples[0].response_length, samples[0].tokens = 4, [1] * 5
    samples[1].tokens, samples[1].response_length = [1] * 9, 2
    samples[2].status, samples[2].label = Status.FAILED, None
    samples[3].label, samples[3].remove_sample = "", True
    samples[4].loss_mask = np.zeros(2, np.int32)
    samples[5].response = "other"
    samples[6].metadata = {"no_room_after_turns": 1}
    samples[7].metadata = {"no_room_after_turns": 4}
    config = Config.from_flat({"rollout_max_response_len": 4, "rollout_max_context_len": 9})
    raw = [0.0, 0.25, *[0.5] * 6]
    facts, _ = rollout_facts(config, samples, raw, [0.0] * 8)
    assert (facts.num_samples, facts.num_groups, facts.num_equal_groups, facts.is_all_equal) == (8, 4, 3, False)
    assert (facts.num_truncated, facts.num_at_response_limit, facts.num_at_context_limit) == (2, 1, 1)
    assert (facts.num_failed, facts.num_without_label, facts.num_trained, facts.num_no_second_turn) == (1, 2, 5, 1)
    assert facts.num_same_text == 3, "of the third group the answers differ"
    assert (facts.lowest, facts.highest, facts.teaches_nothing) == (0.0, 0.5, True)
    assert facts.example is not None and facts.example.index == 3, "completed, as most of the equal groups"


def test_what_is_shown_is_short_and_spread() -> None:
    samples = samples_of([0.0] * 8)
    samples[0].prompt = [{"role": "user", "content": "x" * 5000 + "end"}]
    samples[0].response = "y" * 100_000

    def glimpses(samples: list[Sample], count: int) -> list[Glimpse]:
        rewards = [0.0] * len(samples)
        return rollout_facts(Config.from_flat({"log_samples": count}), samples, rewards, rewards)[1]

    shown = glimpses(samples, 3)
    assert [one.index for one in shown] == [0, 2, 5]
    assert shown[0].prompt.endswith("xend") and len(shown[0].prompt) < 1100 and len(shown[0].response) < 1100
    assert glimpses(samples, 0) == [] and glimpses([], 4) == []
    assert len(glimpses(samples, 100)) == 8
