"""Numbers about rollouts and evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusionrl.buffer.evaluation import eval_metrics, eval_table
from fusionrl.buffer.rollout_report import rollout_metrics, set_metrics
from fusionrl.buffer.training_samples import best_and_worst, group_advantages
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample, Status


def test_of_a_rollout() -> None:
    statuses = ["completed", "truncated", "failed", "aborted"]
    samples = [Sample(response_length=n, status=Sample.Status(s)) for n, s in zip((2, 4, 0, 2), statuses, strict=True)]
    for i, sample in enumerate(samples):
        sample.group_index = i // 2
    found = rollout_metrics(samples, [1.0, 0.0, 0.5, 0.5])
    wanted = {"raw_reward": 0.5, "accuracy": 0.25, "response_len/mean": 2.0, "response_len/max": 4.0, "num_tokens": 8.0}
    wanted |= {"truncated_ratio": 0.25, "failed": 2.0, "zero_std_groups": 0.5}
    assert {name: found[f"rollout/{name}"] for name in wanted} == wanted


def test_the_parts_of_a_weighted_sum() -> None:
    own: list[dict[str, Any]] = [{}, {"rewards": ["a user's column"]}, {"rewards": {"gold": "medal"}}]
    parts = [{"rewards": {"math": 1.0, "format": 0.0}}, {"rewards": {"math": 0.0}}, *own]
    found = rollout_metrics([Sample(metadata=m) for m in parts], [1.0, 0.0, 0.0, 0.0, 0.0])
    assert found["rollout/reward_math"] == 0.5
    assert found["rollout/reward_format"] == 0.0


def test_what_engines_drafted() -> None:
    """In the names of SGLang 0.5.23, and in those of 0.5.17."""
    samples = [Sample(), Sample(), Sample()]
    assert not any("spec" in name for name in rollout_metrics(samples, [0.0] * 3))
    drafts = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 10, "spec_verify_ct": 2}
    samples[0].spec_info.add(drafts | {"completion_tokens": 8})
    drafts = {"spec_accept_token_num": 0, "spec_draft_token_num": 5, "spec_verify_ct": 1}
    samples[2].spec_info.add(drafts | {"completion_tokens": 1})
    found = rollout_metrics([Sample.from_dict(sample.to_dict()) for sample in samples], [0.0] * 3)
    assert found["rollout/spec_accept_rate"] == 6 / 15
    assert found["rollout/spec_accept_length"] == 9 / 3


def test_of_the_sets_of_a_mixture() -> None:
    names = ["a", "b", "a", None, "a"]
    samples = [Sample(metadata={} if name is None else {"data_source": name}) for name in names]
    assert set_metrics(samples, [1.0, 0.25, 0.0, 9.0, 0.5]) == {
        **{"rollout/a/raw_reward": 0.5, "rollout/a/accuracy": 1 / 3, "rollout/a/num_samples": 3.0},
        **{"rollout/b/raw_reward": 0.25, "rollout/b/accuracy": 0.0, "rollout/b/num_samples": 1.0},
    }


def test_of_an_evaluation() -> None:
    found = eval_metrics({"a": {"rewards": [1.0, 0.0], "truncated": [True, False]}, "b": {"rewards": [0.5]}})
    assert found["eval/a/reward"] == 0.5
    assert found["eval/a/truncated_ratio"] == 0.5
    assert found["eval/b/accuracy"] == 0.0
    assert found["eval/b/num_samples"] == 1.0
    with pytest.raises(ValueError, match="'c' has no samples"):
        eval_metrics({"c": {"rewards": []}})


def test_of_an_evaluation_with_several_samples_of_a_prompt() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0]
    samples = [Sample(group_index=i // 4, response_length=n) for i, n in enumerate([1, 2, 3, 10] * 3)]
    found = eval_metrics({"a": {"rewards": rewards, "samples": samples, "truncated": [False] * 9 + [True] * 3}})
    assert found["eval/a/accuracy"] == found["eval/a/pass@1"] == pytest.approx(5 / 12)
    assert found["eval/a/pass@2"] == pytest.approx(
        (0.5 + 1 + 0) / 3
    )  # of the pairs of the first, 3 in 6 hold its right one
    assert found["eval/a/pass@4"] == pytest.approx(2 / 3)
    assert "eval/a/pass@8" not in found
    assert found["eval/a/accuracy_ci95"] == pytest.approx(1.96 * np.std([0.25, 1, 0], ddof=1) / np.sqrt(3), rel=1e-4)
    assert found["eval/a/reward_ci95"] == pytest.approx(1.96 * np.std([0.25, 1, 0.125], ddof=1) / np.sqrt(3), rel=1e-4)
    assert (found["eval/a/num_prompts"], found["eval/a/num_samples"]) == (3, 12)
    assert (found["eval/a/response_len"], found["eval/a/response_len_median"]) == (4.0, 2.5)
    assert (found["eval/a/response_len_max"], found["eval/a/truncated_ratio"]) == (10.0, 0.25)


def test_one_prompt_has_no_interval_and_uneven_prompts_the_smallest_k() -> None:
    found = eval_metrics({"a": {"rewards": [1.0, 0.0], "samples": [Sample(group_index=0), Sample(group_index=0)]}})
    assert not any("ci95" in key for key in found)
    uneven = [Sample(group_index=g) for g in (0, 0, 1)]
    found = eval_metrics({"a": {"rewards": [1.0, 0.0, 1.0], "samples": uneven}})
    assert found["eval/a/pass@1"] == 0.75
    assert "eval/a/pass@2" not in found


def test_the_table_of_an_evaluation() -> None:
    samples = [Sample(group_index=i // 2, response_length=3) for i in range(4)]
    sets = {
        "long-name": {"rewards": [1.0, 0.0, 0.0, 0.0], "samples": samples, "truncated": [True, False, False, False]},
        "b": {"rewards": [0.5]},
    }
    lines = eval_table({**eval_metrics(sets), "perf/time_eval_s": 1.0, "eval/loss": 2.0}).splitlines()
    assert " ".join(lines[0].split()) == "set prompts samples accuracy reward pass@1 pass@2 length longest truncated"
    assert " ".join(lines[1].split()) == "long-name 2 4 0.2500 ± 0.4900 0.2500 ± 0.4900 0.2500 0.5000 3.0 3 25.0%"
    assert " ".join(lines[2].split()) == "b 1 1 0.0000 0.5000 0.0000 - - - -"
    assert len({len(line) for line in lines[:3]}) == 1
    assert "95 % interval" in lines[3]


def test_a_failed_sample_needs_no_greedy_answer() -> None:
    remax = Config.from_flat({"advantage_estimator": "remax"})
    samples = [
        Sample(group_index=0, status=Sample.Status.COMPLETED, reward=1.0, baseline_reward=0.25),
        Sample(group_index=1, status=Sample.Status.FAILED, reward=1.0),
    ]
    assert group_advantages(samples, [1.0, 1.0], remax)[0] == 0.75
    samples[1].status = Sample.Status.COMPLETED
    with pytest.raises(ValueError, match="has no baseline_reward"):
        group_advantages(samples, [1.0, 1.0], remax)


def test_the_first_best_and_the_first_worst_of_each_group() -> None:
    groups = [0, 0, 0, 1, 1, 2, 2, 3]
    rewards = [0.5, 1.0, 0.0, 1.0, 1.0, 2.0, -1.0, 5.0]
    samples = [Sample(index=i, group_index=group) for i, group in enumerate(groups)]
    assert best_and_worst(samples, rewards) == [(1, 2), (5, 6)], "equal rewards, and one alone, make no pair"


def test_who_is_not_trained_on_is_nobodys_partner() -> None:
    samples = [Sample(index=i, group_index=0) for i in range(4)]
    samples[0].remove_sample, samples[3].status = True, Status.FAILED
    assert best_and_worst(samples, [9.0, 1.0, 0.5, -9.0]) == [(1, 2)]
