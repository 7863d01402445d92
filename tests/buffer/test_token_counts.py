"""Tokens generated, trained, dropped and prefilled again; seconds of waiting by their reason."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.buffer.staleness import StepStaleness
from fusionrl.buffer.stream_metrics import StreamClock, TokenCounts, prefilled_again, reason_of, state_numbers
from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.pipeline.apply import apply
from fusionrl.pipeline.decide import decide
from fusionrl.pipeline.events import Admitted, Fetch, GroupReady, SampleDone, StreamEnd, TrainDone
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import State
from fusionrl.plan.balance import Balance, SequenceCost
from fusionrl.plan.batch import BatchPlan
from tests.plan.shards import build_shards


def sample(length: int, versions: list[int] | None = None, **fields) -> Sample:
    tokens = [1, 2, 3] + [4] * length
    return Sample(tokens=tokens, response_length=length, weight_versions=versions or [0] * length, **fields)


@pytest.mark.parametrize(
    ("versions", "count"),
    [
        ([4, 4, 4, 4], 0),
        ([4, 4, 5, 5], 3 + 2),
        ([4, 5, 5, 6], (3 + 1) + (3 + 3)),
        ([4, -1, -1, 5], 3 + 3),  # a tool's tokens, of no weights, came in between
        ([-1, -1, -1, -1], 0),
    ],
)
def test_what_is_prefilled_again(versions: list[int], count: int) -> None:
    assert prefilled_again(sample(4, versions)) == count


def test_tokens_by_what_became_of_them() -> None:
    tally = TokenCounts()
    short, long, filtered = sample(2, [0, 1]), sample(10), sample(6)
    failed = sample(4, status=Sample.Status.FAILED)
    tally.began(0, [Sample(tokens=[1, 2, 3])])
    for ordinal, group in enumerate([[short, failed], [long], [filtered]]):
        tally.generated(ordinal, group)
    tally.dropped(2)
    assert tally.take({0: [short, failed]}, True) == {
        "pipeline/tokens_generated": 22.0,
        "pipeline/tokens_trained": 2.0,  # none of a sample that failed
        "pipeline/tokens_dropped": 6.0,
        "pipeline/tokens_prefilled_again": 4.0,
        "pipeline/length_trained_by_offered": 2 / 6,  # the long one and the filtered one were offered too
    }
    again = tally.take({1: [long]}, True)
    assert again["pipeline/tokens_generated"] == again["pipeline/tokens_dropped"] == 0.0
    assert again["pipeline/length_trained_by_offered"] == 1.0


def test_a_kv_cache_that_is_kept_is_not_computed_again() -> None:
    tally, one = TokenCounts(), sample(2, [0, 1])
    tally.generated(0, [one])
    assert tally.take({0: [one]}, False)["pipeline/tokens_prefilled_again"] == 0.0


def test_a_group_that_is_given_up_under_way() -> None:
    """What has ended of it was generated, and is dropped; its prompt may be tried again."""
    tally, ended, going_on = TokenCounts(), sample(5), Sample(tokens=[1, 2, 3])
    tally.began(0, [ended, going_on])
    tally.dropped(0)
    tally.began(0, [going_on])
    tally.generated(0, [sample(2)])
    found = tally.take({0: [sample(2)]}, True)
    assert (found["pipeline/tokens_generated"], found["pipeline/tokens_dropped"]) == (7.0, 5.0)
    assert found["pipeline/length_trained_by_offered"] == 2 / 3.5


def test_answers_of_a_checkpoint_are_trained_and_were_offered_before() -> None:
    tally = TokenCounts()
    tally.generated(1, [sample(4)])
    found = tally.take({0: [sample(9)], 1: [sample(4)]}, True)
    assert found["pipeline/tokens_trained"] == 13.0 and found["pipeline/length_trained_by_offered"] == 1.0


def test_seconds_go_to_what_holds() -> None:
    clock = StreamClock()
    clock.note(100.0, None, False)
    clock.note(101.0, "batch", True)  # a second without work before it
    clock.note(104.0, "deadline", True)
    clock.note(106.0, None, False)
    found = clock.take(110.0)
    assert (found["perf/time_wait_batch_s"], found["perf/time_wait_deadline_s"]) == (3.0, 2.0)
    assert found["perf/engines_idle"] == pytest.approx(0.5)
    later = clock.take(111.0)  # nothing was told since: engines have still no work
    assert (later["perf/time_wait_batch_s"], later["perf/engines_idle"]) == (0.0, 1.0)


def test_the_controller_says_what_the_trainers_wait_for() -> None:
    """First too few groups are ready; then enough are, and one that is due is not."""
    knobs, state = Knobs(groups_per_fetch=1, num_fetches=4, max_staleness=1, lead=1.0), State()
    for ordinal in range(2):
        apply(state, knobs, Admitted(ordinal, 1))
    assert reason_of(decide(state, knobs)) == "batch"
    for event in (SampleDone(1), GroupReady(1)):
        apply(state, knobs, event)
    (fetch,) = decide(state, knobs)
    assert isinstance(fetch, Fetch) and reason_of([fetch]) is None
    apply(state, knobs, fetch)
    assert reason_of(decide(state, knobs)) is None, "they train"
    numbers = state_numbers(state, knobs)
    assert (numbers["pipeline/credits"], numbers["pipeline/credits_used"]) == (1.0, 1.0)
    apply(state, knobs, TrainDone())
    apply(state, knobs, StreamEnd())
    state.version = 1
    apply(state, knobs, Admitted(2, 1))
    for event in (SampleDone(2), GroupReady(2)):
        apply(state, knobs, event)
    assert reason_of(decide(state, knobs)) == "deadline", "group 0 is due, and under way"


# ----------------------------------------------------------- optimizer steps since a token was sampled
NUM_STEPS, SIZE = 2, 4  # steps of the rollout; samples of a step


def samples() -> list[Sample]:
    """Eight samples of three tokens; the second one's versions are not known, nor one token of the third."""
    versions = [[5, 5, 6], None, [6, -1, 6], [4, 4, 4], [6, 6, 6], [5, 6, 6], [6, 6, 6], [3, 6, 6]]
    return [
        Sample(index=i, group_index=i, tokens=[1, 2, 3, 4], response_length=3, loss_mask=mask, weight_versions=known)
        for i, (known, mask) in enumerate(zip(versions, [[1, 1, 1]] * 7 + [[0, 1, 1]], strict=True))
    ]


def shards(dp_size: int = 2) -> list[TrainShard]:
    plan = BatchPlan(SIZE * NUM_STEPS, 1, NUM_STEPS, SIZE, dp_size)
    balance = Balance(SequenceCost(linear=1.0, quadratic=0.0), 200, 2)
    made, rewards = samples(), [0.0] * SIZE * NUM_STEPS
    return build_shards(made, rewards, rewards, plan, balance, rollout_id=6, weight_version=6)


def count(rollout_id: int, **options: int) -> dict[str, float]:
    since = StepStaleness(rollout_id, **options)
    for shard in shards():
        since.add(shard)
    return since.metrics()


def test_every_token_brings_its_version_into_the_shard() -> None:
    """Where one sample has none, the others keep theirs, and its own are unknown."""
    known = {
        int(index): list(versions)
        for shard in shards()
        for index, versions in zip(shard.fields["sample_index"], shard.split("weight_versions"), strict=True)
    }
    assert known[0] == [5, 5, 6] and known[1] == [-1, -1, -1] and known[2] == [6, -1, 6]
    assert shards()[0].fields["weight_versions"].dtype == np.int32


def test_steps_of_former_rollouts_and_of_this_one() -> None:
    """Rollout 6 in two steps: version 6 is 0 old in the first, 1 in the second; each version before is two more."""
    ages = []
    for i, sample in enumerate(samples()):
        mask = [0, 1, 1] if i == 7 else [1, 1, 1]
        for version, counts in zip(sample.weight_versions or [], mask, strict=False):
            if counts and version >= 0:
                ages.append((6 - int(version)) * NUM_STEPS + i // SIZE)
    found = count(6)
    assert found["rollout/steps_since_sampled/mean"] == pytest.approx(np.mean(ages))
    assert found["rollout/steps_since_sampled/max"] == max(ages) == 4


def test_rollouts_that_train_a_critic_alone_move_nothing() -> None:
    assert count(6, num_untrained=7) == {}
    assert count(6, num_untrained=6)["rollout/steps_since_sampled/max"] == 1
