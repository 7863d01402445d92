"""Filters, and the forms in which rollout functions may return their samples."""

import argparse
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rollout.filters import check_accuracy_in_range, check_reward_nonzero_std
from fusionrl.rollout.types import RolloutFnTrainOutput, as_eval_output, as_train_output


def group(*rewards: Any, number: int | None = 0) -> list[Sample]:
    return [Sample(reward=reward, group_index=number) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 1.0), None),
        ((1.0, 1.0), "all_1.0"),
        ((0.0, 0.0), "all_0.0"),
        ((None, 1.0, 0.0), None),  # a sample that failed has no reward
        ((None, None), "unscored"),
    ],
)
def test_groups_without_a_signal_are_dropped(rewards: tuple[Any, ...], reason: str | None) -> None:
    verdict = check_reward_nonzero_std(argparse.Namespace(reward_key=None), group(*rewards))
    assert (verdict.keep, verdict.reason) == (reason is None, reason)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 0.0, 0.0, 0.0, 0.0), None),  # 0.2 and 0.8, the ends, count
        ((1.0, *[0.0] * 5), "too_hard"),
        ((*[1.0] * 5, -1.0), "too_easy"),
        ((1.0, 0.0, None, None, None, None), None),  # what failed does not count
        ((None, None), "unscored"),
    ],
)
def test_groups_that_are_too_easy_or_too_hard_are_dropped(rewards: tuple[Any, ...], reason: str | None) -> None:
    args = argparse.Namespace(reward_key=None, accuracy_lower_bound=0.2, accuracy_upper_bound=0.8)
    verdict = check_accuracy_in_range(args, group(*rewards))
    assert (verdict.keep, verdict.reason) == (reason is None, reason)
    wide = argparse.Namespace(reward_key=None, accuracy_lower_bound=0.0, accuracy_upper_bound=1.0)
    assert check_accuracy_in_range(wide, group(*rewards)).keep == (reason != "unscored")


def test_forms_of_a_rollout() -> None:
    first, second = group(1, 2), group(3, 4, number=1)
    assert as_train_output([first, second]) == RolloutFnTrainOutput([first, second], {})
    assert as_train_output(RolloutFnTrainOutput([first], {"a": 1})).metrics == {"a": 1}
    assert as_train_output(argparse.Namespace(samples=[first], metrics=None)).samples == [first]
    # Flat: siblings are told by their group; without one, each is its own.
    assert [len(g) for g in as_train_output([*first, *second]).samples] == [2, 2]
    assert [len(g) for g in as_train_output(group(1, 2, number=None)).samples] == [1, 1]
    # A generate function that returns several samples leaves a list within its group.
    assert [len(g) for g in as_train_output([[first, [second[0]]], second]).samples] == [3, 2]


@pytest.mark.parametrize(
    ("output", "part"),
    [(None, "NoneType"), ({"x": 1}, "dict"), ([{"tokens": []}], "a dict where a Sample"), ([[1]], "an? int")],
)
def test_what_is_no_rollout(output: Any, part: str) -> None:
    with pytest.raises(ValueError, match=f"--rollout-function-path: it returned .*{part}"):
        as_train_output(output)


def test_forms_of_an_evaluation() -> None:
    data = {"set": {"rewards": [1.0]}}
    assert as_eval_output(data).data == data
    assert as_eval_output(argparse.Namespace(data=data, metrics={"a": 1})).metrics == {"a": 1}
    with pytest.raises(ValueError, match="--eval-function-path: it returned list"):
        as_eval_output([])
