"""Attempts that come back as several samples: group statistics, denominators, metrics and filters count attempts."""

import copy
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.algorithms.stages import SampleBatch
from fusionrl.buffer.evaluation import eval_set_metrics
from fusionrl.buffer.rollout_report import rollout_metrics, set_metrics
from fusionrl.data.sample import Sample, Status
from fusionrl.data.train_batch import attempts_of, join_attempt
from fusionrl.plan.balance import Balance, BatchPlan, SequenceCost
from fusionrl.rollout.filters import check_accuracy_in_range
from fusionrl.rollout.types import as_train_output
from tests.plan.shards import build_shards

STAGES = {name: stage for name, estimator in ESTIMATORS.items() if (stage := estimator.group_stage())}
STAGES["grpo, plain"] = ESTIMATORS["grpo"].group_stage(is_plain=True)  # type: ignore[assignment]
BALANCE = Balance(SequenceCost(linear=1.0, quadratic=0.0), 99)


def fanned(counts: list[int], rewards: list[float], group: int = 0, lengths: int = 2) -> list[Sample]:
    """One group of attempts of so many samples each, all with the attempt's reward."""
    fields: dict[str, Any] = {"group_index": group, "tokens": list(range(1, 2 + lengths)), "response_length": lengths}
    fields |= {"status": Status.COMPLETED, "metadata": {"data_source": "a"}}
    samples = []
    for number, (count, reward) in enumerate(zip(counts, rewards, strict=True), 10 * group):
        attempt = [Sample(index=number, reward=reward, **copy.deepcopy(fields)) for _ in range(count)]
        join_attempt(attempt, number)
        samples += attempt
    return samples


def test_the_attempts_of_samples() -> None:
    samples = [*fanned([1, 3, 1], [0, 1, 0]), *fanned([2, 1], [1, 0], group=1)]
    assert attempts_of(samples).tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
    assert [s.rollout_id for s in samples] == [None, 1, 1, 1, None, 10, 10, None]
    of_slime = Sample(group_index=0, rollout_id=1)  # a function's own numbers stay, and mean one attempt of its group
    assert attempts_of([*samples, of_slime])[-1] == 1 and attempts_of([]).size == 0
    unnumbered = [[Sample(group_index=0) for _ in range(2)] for _ in range(2)]  # of a user's data source
    for attempt in unnumbered:
        join_attempt(attempt, None)
    assert attempts_of([*unnumbered[0], *unnumbered[1]]).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("seed", range(2))
def test_every_estimator_gives_each_sample_the_advantage_of_its_attempt(name: str, seed: int) -> None:
    """By a loop: what the stage gives for the attempts alone, each as one sample."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, 12)
    values = random.integers(0, 2, 12).astype(float) if name == "pass_at_k" else random.normal(size=12)
    groups, lengths, baselines = np.repeat([0, 1, 2], 4), random.integers(1, 9, 12), random.normal(size=12)
    scored = random.random(12) < 0.9
    attempts = np.repeat(np.arange(12), sizes)
    shuffled = random.permutation(len(attempts))  # samples of an attempt need not stand together
    spread = {
        "rewards": values[attempts][shuffled],
        "group_index": groups[attempts][shuffled],
        "lengths": (lengths / sizes)[attempts][shuffled],  # OPO weighs an attempt by all of its tokens
        "baselines": baselines[attempts][shuffled],
        "scored": scored[attempts][shuffled],
        "attempts": attempts[shuffled],
    }
    whole = SampleBatch(values, groups, lengths, baselines, 2, scored)
    want = STAGES[name](whole)[attempts][shuffled]
    assert STAGES[name](SampleBatch(k=2, **spread)) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "attempts", "advantages"),
    [
        ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 2, 3], [0.75] * 3 + [-0.25] * 3),  # and not ±0.5
        ([1, 0, 0], [0, 0, 1], [0.75, -0.25, -0.25]),  # samples of an attempt with rewards of their own
    ],
)
def test_rewards_are_held_against_the_mean_of_attempts(
    rewards: list[float], attempts: list[int], advantages: list[float]
) -> None:
    batch = SampleBatch(np.array(rewards, float), np.zeros(len(rewards), int), attempts=np.array(attempts))
    assert ESTIMATORS["dr_grpo"].group(batch).tolist() == advantages  # type: ignore[misc]


def test_an_attempt_is_not_divided_over_two_steps() -> None:
    samples = [*fanned([3, 1], [1, 0], 0), *fanned([1, 3], [1, 0], 1)]
    values = [0.0] * 8
    (shard,) = build_shards(samples, values, values, BatchPlan(2, 4, 2, 4, 1), BALANCE, rollout_id=0)
    of_step = [{int(shard.fields["group_index"][i]) for b in step.micro_batches for i in b} for step in shard.steps]
    assert of_step == [{0}, {1}] and [step.num_samples for step in shard.steps] == [2, 2]


def test_metrics_count_attempts() -> None:
    samples = [*fanned([3, 1, 1, 1], [1, 0, 0, 0]), *fanned([1, 1, 1, 1], [0, 0, 0, 1], 1)]
    raw = [float(s.reward) for s in samples]  # type: ignore[arg-type]
    of_rollout = rollout_metrics(samples, raw) | set_metrics(samples, raw)
    wanted = {"accuracy": 0.25, "raw_reward": 0.25, "num_samples": 10, "num_attempts": 8, "a/accuracy": 0.25}
    wanted |= {"raw_reward_std": np.std([1, 0, 0, 0, 0, 0, 0, 1])}
    assert {name: of_rollout[f"rollout/{name}"] for name in wanted} == pytest.approx(wanted)
    of_eval = eval_set_metrics("a", {"rewards": raw, "samples": samples})
    # Both prompts are answered alike.
    wanted = {"accuracy": 0.25, "num_samples": 8, "pass@4": 1.0, "pass@1": 0.25, "accuracy_ci95": 0.0}
    assert {name: of_eval[name] for name in wanted} == pytest.approx(wanted)


def test_the_filter_of_accuracy_counts_attempts() -> None:
    args = Namespace(accuracy_lower_bound=0.2, accuracy_upper_bound=0.3, reward_key=None)
    assert check_accuracy_in_range(args, fanned([3, 1, 1, 1], [1, 0, 0, 0])).keep
    assert not check_accuracy_in_range(args, fanned([1, 1, 1, 3], [1, 1, 0, 0])).keep


def test_a_rollout_function_that_returns_lists_within_a_group() -> None:
    made = [Sample(index=5, group_index=1), Sample(index=5, group_index=1), Sample(index=6, group_index=1)]
    (group,) = as_train_output([[made[:2], made[2]]]).samples
    assert attempts_of(group).tolist() == [0, 0, 1] and group[2].rollout_id is None
    copies = [[Sample(index=5, group_index=1) for _ in range(2)] for _ in range(3)]
    assert attempts_of(as_train_output([copies]).samples[0]).tolist() == [0, 0, 1, 1, 2, 2]
