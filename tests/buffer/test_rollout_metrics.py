"""Numbers about rollouts and evaluations."""

from typing import Any

import numpy as np
import pytest

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.algorithms.stages import SampleBatch
from fusionrl.buffer.evaluation import MixedVersions, check_one_version, eval_metrics, eval_table
from fusionrl.buffer.rollout_report import best_and_worst, rollout_facts, rollout_metrics, set_metrics, teaches_nothing
from fusionrl.buffer.rollout_stages import group_advantages
from fusionrl.buffer.stream_state import StreamClock, TokenCounts, prefilled_again, reason_of, state_numbers
from fusionrl.buffer.train_shards import StepStaleness
from fusionrl.checks.training import OF_GROUPS
from fusionrl.config.config import Config
from fusionrl.data.sample import Sample, Status
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.advice import Glimpse
from fusionrl.pipeline.controller import apply, decide
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Admitted, Fetch, GroupReady, SampleDone, State, StreamEnd, TrainDone
from fusionrl.plan.balance import Balance, BatchPlan
from fusionrl.plan.costs import SequenceCost
from tests.plan.shards import build_shards


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
    wanted = {"a/reward": 0.5, "a/truncated_ratio": 0.5, "b/accuracy": 0.0, "b/num_samples": 1.0}
    assert {name: found[f"eval/{name}"] for name in wanted} == wanted
    with pytest.raises(ValueError, match="'c' has no samples"):
        eval_metrics({"c": {"rewards": []}})


def test_of_an_evaluation_with_several_samples_of_a_prompt() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0]
    samples = [Sample(group_index=i // 4, response_length=n) for i, n in enumerate([1, 2, 3, 10] * 3)]
    found = eval_metrics({"a": {"rewards": rewards, "samples": samples, "truncated": [False] * 9 + [True] * 3}})
    assert found["eval/a/accuracy"] == found["eval/a/pass@1"] == pytest.approx(5 / 12)
    assert found["eval/a/pass@2"] == pytest.approx((0.5 + 1 + 0) / 3), "of the first's pairs, 3 in 6 hold its right one"
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


# ---------------------------------------------- an evaluation has tokens of one version of the weights
def result(*versions: Any) -> Any:
    samples = [
        Sample(index=i, tokens=[1] * (1 + len(known or [])), response_length=len(known or []), weight_versions=known)
        for i, known in enumerate(versions)
    ]
    return {"rewards": [0.0] * len(versions), "samples": samples}


@pytest.mark.parametrize(
    ("versions", "pushed", "found"),
    [
        ([[3, -1], None], 3, 3),  # nobody said which weights sampled the others
        ([["3", "3"]], 3, 3),  # a text for each turn, as slime's functions append them
        ([[2, 2]], None, 2),
        ([["default"]], None, 0),
        ([None], None, None),
        ([], 4, 4),
    ],
)
def test_the_one_version(versions: list[Any], pushed: int | None, found: int | None) -> None:
    assert check_one_version({"aime": result(*versions)}, pushed, 7) == found


@pytest.mark.parametrize(
    ("data", "pushed", "said"),
    [
        ({"a": result([3, 3], [3, 4])}, 3, "engines were pushed version 3, and sample 1 of set a .* version 4"),
        ({"a": result([5]), "b": result([5], ["6"])}, None, "sample 0 of set a .* 5, and sample 1 of set b .* 6"),
        ({"a": result([5, 6])}, None, "after step 7 would mix two versions of the weights: .* version 5, and .* 6"),
    ],
)
def test_a_result_of_two_versions_is_an_error_that_names_both(data: Any, pushed: int | None, said: str) -> None:
    with pytest.raises(MixedVersions, match=said):
        check_one_version(data, pushed, 7)


# ----------------- facts about a rollout: whether equal rewards teach nothing, and what warnings count
EQUAL = [0.0, 0.0, 1.0, 1.0]  # two groups of two: equal within, different between
ALL_ZERO, ALL_ONE, MIXED = [0.0] * 4, [1.0] * 4, [0.0, 1.0, 1.0, 1.0]
ALL = (EQUAL, ALL_ZERO, ALL_ONE, MIXED)
FUNCTIONS = ("custom_policy_loss", "custom_convert_samples_to_train_data", "custom_advantage_function")
FUNCTIONS += ("rollout_data_postprocess",)


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


RAW, WHITENED = {"disable_rewards_normalization": True}, {"normalize_advantages": True}
REMAX, PRIME, PLUS_PLUS = ({"advantage_estimator": name} for name in ("remax", "prime", "reinforce_plus_plus"))
PAIRS = {"policy_loss": "dpo", "n_samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("teaches", "rewards", "flags"),
    [
        *((rewards is MIXED, rewards, {"advantage_estimator": name}) for name in sorted(OF_GROUPS) for rewards in ALL),
        (True, ALL_ONE, REMAX),  # the greedy answer got 0.5
        (False, ALL_ONE, REMAX | WHITENED),
        (True, ALL_ZERO, {"advantage_estimator": "ppo"}),  # the critic's values differ
        (True, ALL_ZERO, PRIME),  # the process rewards do
        (False, ALL_ZERO, PRIME | {"prm_process_coef": 0.0}),
        (True, ALL_ZERO, {"use_opd": True}),  # the teacher's log-probs do
        (True, EQUAL, PLUS_PLUS),  # which whitens the whole rollout, and the groups differ from each other
        (False, ALL_ONE, PLUS_PLUS),
        (False, ALL_ZERO, PLUS_PLUS),
        (True, ALL_ONE, PLUS_PLUS | {"gamma": 0.9}),  # a token is worth the less the further it is from the end
        (False, ALL_ZERO, PLUS_PLUS | {"gamma": 0.9}),
        (True, ALL_ZERO, PLUS_PLUS | {"kl_coef": 0.1}),  # the price for KL differs
        (False, ALL_ZERO, RAW),
        (True, ALL_ONE, RAW),  # every token is made likelier
        (False, ALL_ONE, RAW | WHITENED),
        (False, EQUAL, PAIRS),  # no pair
        (True, MIXED, PAIRS),
        # Nothing is claimed where it is not known.
        (True, ALL_ZERO, {"mode": "reject-sampling"}),
        (True, ALL_ZERO, {"loss_type": "sft_loss"}),
        *((True, ALL_ZERO, {f"{name}_path": "m.f"}) for name in FUNCTIONS),
    ],
    ids=str,
)
def test_whether_rewards_teach(teaches: bool, rewards: list[float], flags: dict[str, Any]) -> None:
    assert nothing(rewards, **flags) is not teaches


def test_a_greedy_answer_with_the_same_reward_teaches_nothing() -> None:
    assert nothing(ALL_ONE, [0.0] * 4, **REMAX)


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


# ----------------------------------- tokens by what became of them; seconds of waiting by their reason
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
    clock.note(112.0, "batch", True)
    waits = [clock.take(now)["perf/time_wait_batch_s"] for now in (113.0, 116.0)]
    assert waits == [1.0, 0.0], "they have their batch, though nothing is noted"


def test_the_controller_says_what_the_trainers_wait_for() -> None:
    """First too few groups are ready; then enough are, and one that is due is not."""
    knobs, state = Knobs(groups_per_fetch=1, num_fetches=4, max_staleness=1, admission_lead=1.0), State()
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
