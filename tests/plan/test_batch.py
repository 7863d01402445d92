"""Batch arithmetic and packing: nothing lost, nothing doubled, as many micro-batches on every rank."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrl.data.sample import Sample
from fusionrl.data.train_batch import TrainShard
from fusionrl.plan.balance import Balance, BatchPlan, plan_batches
from fusionrl.plan.costs import SequenceCost
from tests.plan.shards import build_shards

COST = SequenceCost(linear=10.0, quadratic=1.0)


def shards_of(samples: list[Sample], plan: BatchPlan, balance: Balance) -> list[TrainShard]:
    zeros = [0.0] * len(samples)
    return build_shards(samples, zeros, zeros, plan, balance, rollout_id=0)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[BatchPlan, list[Sample], int, int | None]:
    dp_size, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = draw(st.integers(dp_size, 10))
    samples = []
    for index in range(size * num_steps):
        prompt, response = draw(st.integers(1, 20)), draw(st.integers(0, 20))
        mask = draw(st.lists(st.integers(0, 1), min_size=response, max_size=response))
        tokens = [1000 * index + i for i in range(prompt + response)]
        sample = Sample(index=index, group_index=index // 2, tokens=tokens, response_length=response, loss_mask=mask)
        sample.rollout_log_probs = [-0.5] * response
        sample.status = draw(st.sampled_from([Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED]))
        sample.remove_sample = draw(st.booleans())
        samples.append(sample)
    plan = BatchPlan(size * num_steps, 1, num_steps, size, dp_size)
    return plan, samples, draw(st.integers(40, 90)), draw(st.one_of(st.none(), st.integers(1, 3)))


@settings(max_examples=30, deadline=None)
@given(rollouts())
def test_shards_lose_and_double_nothing(case: tuple[BatchPlan, list[Sample], int, int | None]) -> None:
    plan, samples, max_tokens, micro_batch_size = case
    values = [float(s.index or 0) for s in samples]
    balance = Balance(COST, max_tokens, micro_batch_size, share_prompts=max_tokens % 2 == 0)
    shards = build_shards(samples, values, [-v for v in values], plan, balance, rollout_id=3)
    assert len(shards) == plan.dp_size
    trained = [np.asarray(s.loss_mask) * (s.status != Sample.Status.FAILED and not s.remove_sample) for s in samples]
    for step in range(plan.num_steps):
        whole = range(step * plan.global_batch_size, (step + 1) * plan.global_batch_size)
        seen: list[int] = []
        counts = {len(shard.steps[step].micro_batches) for shard in shards}
        assert len(counts) == 1, "ranks run different numbers of micro-batches"
        for shard in shards:
            part = shard.steps[step]
            assert part.num_tokens == sum(int(trained[i].sum()) for i in whole)
            assert part.num_samples == len(whole), "a sample without trained tokens counts as well"
            tokens = shard.split("tokens")
            for members in part.micro_batches:
                indices = [int(shard.fields["sample_index"][m]) for m in members]
                seen += indices
                assert sum(len(tokens[m]) for m in members) <= max_tokens
                assert micro_batch_size is None or len(members) <= micro_batch_size
                for member, index in zip(members, indices, strict=True):
                    assert tokens[member].tolist() == list(samples[index].tokens)
                    assert shard.split("loss_mask")[member].tolist() == trained[index].tolist()
                    assert shard.fields["rewards"][member] == index == -shard.fields["raw_rewards"][member]
                    assert shard.fields["group_index"][member] == index // 2
                    assert shard.fields["truncated"][member] == (samples[index].status == Sample.Status.TRUNCATED)
        assert sorted(seen) == list(whole)


def test_fewer_samples_on_a_rank_than_micro_batches_on_another() -> None:
    """5 samples on 2 ranks, one a micro-batch: 3 and 2; the second rank runs an empty one."""
    samples = [Sample(index=i, tokens=[1, 2, 3], response_length=1) for i in range(5)]
    shards = shards_of(samples, BatchPlan(5, 1, 1, 5, 2), Balance(COST, max_tokens=99, max_samples=1))
    sizes = [sorted(len(batch) for batch in shard.steps[0].micro_batches) for shard in shards]
    assert sizes == [[1, 1, 1], [0, 1, 1]]


def test_an_optional_field_stands_in_every_shard_or_in_none() -> None:
    """Ranks that disagreed about the old policy's log-probs would compute different losses."""

    def build(**lacking: object) -> list[set[str]]:
        fields = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -2.0]}
        samples = [Sample(index=i, **fields) for i in range(4)]
        samples[0].rollout_log_probs = None
        vars(samples[0]).update(lacking)
        return [set(shard.fields) for shard in shards_of(samples, BatchPlan(4, 1, 1, 4, 2), Balance(COST, 99))]

    assert all("rollout_log_probs" not in fields for fields in build())
    # A failed sample trains nothing: it must not cost the others their log-probs.
    assert all("rollout_log_probs" in fields for fields in build(status=Sample.Status.FAILED))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=3, max_size=9), st.integers(1, 3), st.integers(1, 2))
def test_groups_of_any_size_stay_whole(sizes: list[int], num_steps: int, dp_size: int) -> None:
    """Functions of users may make several samples for one prompt; all are trained on, siblings in one step."""
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    samples = [Sample(index=i, group_index=g, tokens=[1, 2, 3], response_length=2) for i, g in enumerate(groups)]
    shards = shards_of(samples, BatchPlan(100, 1, num_steps, 100, dp_size), Balance(COST, 99))
    steps = [
        {int(shard.fields["sample_index"][i]) for shard in shards for b in shard.steps[step].micro_batches for i in b}
        for step in range(num_steps)
    ]
    assert sorted(i for step in steps for i in step) == list(range(len(samples)))
    pairs = itertools.combinations([{groups[i] for i in step} for step in steps], 2)
    assert all(steps) and all(left.isdisjoint(right) for left, right in pairs)
    for number, step in enumerate(steps):
        assert {shard.steps[number].num_tokens for shard in shards} == {2 * len(step)}


def test_a_rollout_that_cannot_be_trained_on_is_refused() -> None:
    one, small = BatchPlan(1, 1, 1, 1, 1), Balance(COST, 9)
    with pytest.raises(ValueError, match=r"has 1 groups of samples for 2 optimizer steps \(--num-steps-per-rollout\)"):
        shards_of([Sample(tokens=[1, 2], response_length=1)], BatchPlan(4, 1, 2, 2, 1), small)
    with pytest.raises(ValueError, match="sample 7: loss_mask has 2 values for 1 response tokens"):
        shards_of([Sample(index=7, tokens=[1, 2], response_length=1, loss_mask=[1, 1])], one, small)
    long = Sample(index=8, tokens=list(range(10)), response_length=1)
    with pytest.raises(ValueError, match="sample 8 has 10 tokens .*over the 9 .*raise --max-tokens-per-gpu"):
        shards_of([long], one, small)
    with pytest.raises(ValueError, match=r"sample 8 has 10 tokens \(16 with padding\), over the 15"):
        shards_of([long], one, Balance(COST, 15, pad_to=8))
    with pytest.raises(ValueError, match=r"sample 8 has 10 tokens, over the 9 \(index_topk\)"):
        shards_of([long], one, Balance(COST, 64, dense_within=9))


@pytest.mark.parametrize(
    ("batch", "steps", "wanted"),
    [(None, None, (1, 32)), (8, None, (4, 8)), (None, 4, (4, 8)), (8, 4, (4, 8)), (32, None, (1, 32))],
)
def test_either_size_gives_the_other(batch: int | None, steps: int | None, wanted: tuple[int, int]) -> None:
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "dp_size": 2}
    plan = plan_batches(**sizes, global_batch_size=batch, num_steps_per_rollout=steps)
    assert (plan.num_steps, plan.global_batch_size, plan.num_samples) == (*wanted, 32)


def test_tokens_are_counted_beyond_what_a_float32_counts() -> None:
    lengths = [2**24 - 1, 2, 2, 2]
    masks = [np.ones(n, np.float32) for n in lengths]
    fields = [{"tokens": np.zeros(len(m), np.int32), "response_length": len(m), "loss_mask": m} for m in masks]
    samples = [Sample(index=i, group_index=i, **values) for i, values in enumerate(fields)]
    (shard,) = shards_of(samples, BatchPlan(4, 1, 1, 4, 1), Balance(COST, 2**25))
    assert shard.steps[0].num_tokens == sum(lengths) == 2**24 + 5


def test_the_engines_experts_reach_the_shards() -> None:
    """Each token's with its sample, -1 for a last token and for a failed sample that has none."""
    random = np.random.default_rng(0)
    samples = [
        Sample(index=i, group_index=i, tokens=list(range(n)), response_length=2, status=Sample.Status.COMPLETED)
        for i, n in enumerate((5, 3, 7, 4))
    ]
    for sample, rows in zip(samples, (4, 3, 6), strict=False):
        sample.rollout_routed_experts = random.integers(0, 8, (rows, 3, 2)).tolist()
    samples[3].status = Sample.Status.FAILED
    recorded = [sample.rollout_routed_experts for sample in samples]
    plan, balance = BatchPlan(4, 1, 1, 4, 2), Balance(COST, 20)
    for shard in shards_of(samples, plan, balance):
        for index, part in zip(shard.fields["sample_index"], shard.split("rollout_routed_experts"), strict=True):
            given = recorded[index] or []
            assert part.shape[1:] == (3, 2)
            assert part[: len(given)].tolist() == given
            assert (part[len(given) :] == -1).all()
            assert len(part) == (5, 3, 7, 4)[index]
    for sample, rows in zip(samples, (4, 3, 6), strict=False):
        sample.__init__(index=0, tokens=[0] * (rows + 1), response_length=2, status=Sample.Status.COMPLETED)
        sample.rollout_routed_experts = np.zeros((rows, rows, 2))
    with pytest.raises(ValueError, match=r"rollout_routed_experts has \(4, 2\) values a token; others have"):
        shards_of(samples, plan, balance)
