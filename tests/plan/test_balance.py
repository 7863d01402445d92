"""Who trains what: bounds that must hold on any input, and figures against brute force."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.balance import Balance, divide, pack, pack_ranks, pipeline_order, split_by_cost
from fusionrl.plan.costs import SequenceCost
from tests.clock import here_s
from tests.models.test_families import shape_of

COST = SequenceCost(linear=24576.0, quadratic=1.0)


def lower_bound(costs: np.ndarray, count: int) -> float:
    """Return a lower bound of the costliest of `count` parts: the mean, or the costliest single item."""
    return max(float(costs.sum()) / count, float(costs.max(initial=0.0)))


def lengths(n: int, seed: int = 0, longest: int = 8192) -> np.ndarray:
    values = np.random.default_rng(seed).lognormal(6.0, 1.0, n)
    return np.clip(values, 16, longest).astype(np.int64)


def flat(parts: list[list[int]]) -> list[int]:
    return sorted(item for part in parts for item in part)


@pytest.mark.parametrize(("n", "ranks"), [(0, 3), (1, 3), (5, 5), (64, 4), (4096, 64)])
def test_ranks_get_equal_cost(n, ranks):
    costs = COST(lengths(n))
    parts = split_by_cost(costs, ranks)
    assert len(parts) == ranks and flat(parts) == list(range(n))
    assert parts == split_by_cost(costs.copy(), ranks), "the same everywhere"
    if n >= 16 * ranks:
        assert max(costs[part].sum() for part in parts) <= 1.001 * lower_bound(costs, ranks)


@pytest.mark.parametrize("seed", range(3))
def test_near_the_best_division_there_is(seed):
    """Against every division of nine items over three ranks."""
    costs = COST(lengths(9, seed))
    choices = (np.array(choice) for choice in itertools.product(range(3), repeat=9))
    best = min(max(costs[choice == rank].sum() for rank in range(3)) for choice in choices)
    assert max(costs[part].sum() for part in split_by_cost(costs, 3)) <= 1.06 * best


@pytest.mark.parametrize("cap", [8192, 33000])
@pytest.mark.parametrize("seed", range(2))
def test_no_bin_is_over_the_cap(seed, cap):
    tokens = lengths(200, seed)
    bins = pack(tokens[:, None], COST(tokens), (cap,))
    assert flat(bins) == list(range(200))
    assert max(int(tokens[members].sum()) for members in bins) <= cap
    assert len(bins) <= -(-11 * int(tokens.sum()) // (9 * cap)) + 1  # first fit decreasing's own bound
    more = pack(tokens[:, None], COST(tokens), (cap,), len(bins) + 3)
    assert len(more) == len(bins) + 3
    costs = np.array([COST(tokens[members]).sum() for members in more])
    assert costs.max() <= 1.1 * max(costs.mean(), COST(tokens).max())


@pytest.mark.parametrize("multiple", [1, 4])
def test_every_rank_runs_the_same_number(multiple):
    tokens = lengths(400, 9)
    costs = COST(tokens)
    ranks = split_by_cost(costs, 8)
    micro = pack_ranks(ranks, tokens[:, None], costs, (9000,), multiple=multiple)
    (count,) = {len(bins) for bins in micro}
    assert count % multiple == 0
    for items, bins in zip(ranks, micro, strict=True):
        assert flat(bins) == items
        assert max(int(tokens[members].sum()) for members in bins) <= 9000


def test_more_micro_batches_for_a_pipeline():
    """Four a stage, or as many as a rank has items."""
    tokens = np.full(40, 10)
    ranks = split_by_cost(COST(tokens), 2)
    for stages, count in ((1, 1), (4, 16), (32, 20)):
        micro = pack_ranks(ranks, tokens[:, None], COST(tokens), (1000,), stages=stages)
        assert {len(bins) for bins in micro} == {count}


def test_siblings_stay_together_where_that_costs_no_rank_more():
    balance = Balance(SequenceCost(1.0, 0.0), max_tokens=1000, share_prompts=True)

    def divided(num_groups: int, prompt: int = 50, balance: Balance = balance) -> list[list[int]]:
        groups = [list(range(i, i + 4)) for i in range(0, 4 * num_groups, 4)]
        count = 4 * num_groups
        return [bins[0] for bins in divide(np.full(count, 60), np.full(count, prompt), groups, 2, balance)]

    for members in divided(4):
        assert len(members) == 8 and {i // 4 for i in members} == {members[0] // 4, members[-1] // 4}
    # Three groups over two ranks: whole ones leave one rank with twice the other's, 2 * (60 + 3 * 10) = 180 tokens,
    # apart each has 6 * 60 = 360. Without shared prompts, or with prompts of one token, whole groups are worth nothing.
    assert [len(members) for members in divided(3)] == [8, 4]
    for apart in (divided(3, balance=replace(balance, share_prompts=False)), divided(3, prompt=1)):
        assert [len(members) for members in apart] == [6, 6]


def test_a_group_that_does_not_fit_is_taken_apart():
    balance = Balance(SequenceCost(1.0, 0.0), max_tokens=120, pad_to=8, share_prompts=True)
    micro = divide(np.full(4, 50), np.full(4, 49), [[0, 1, 2, 3]], 1, balance)
    assert sorted(map(len, micro[0])) == [2, 2]  # 56 tokens each with padding
    micro = divide(np.full(4, 50), np.full(4, 49), [[0, 1, 2, 3]], 1, replace(balance, max_samples=1))
    assert list(map(len, micro[0])) == [1, 1, 1, 1]


def test_too_few_bins_hold_nothing():
    tokens = np.array([5, 5, 5])
    assert pack(tokens[:, None], COST(tokens), (9,), 2) is None
    assert len(pack(tokens[:, None], COST(tokens), (9,))) == 3
    assert pack(tokens[:, None], COST(tokens), (15,)) == [[0, 1, 2]]
    assert pack_ranks([[], []], np.zeros((0, 1), int), np.zeros(0), (10,)) == [[[]], [[]]], "nothing to train"


def test_small_micro_batches_stand_at_both_ends():
    costs = np.array([3.0, 9.0, 1.0, 7.0, 5.0, 2.0])
    ordered = [costs[i] for i in pipeline_order(costs)]
    top = ordered.index(max(ordered))
    up, down = ordered[: top + 1], ordered[top:]
    assert sorted(ordered) == sorted(costs) and up == sorted(up) and down == sorted(down, reverse=True)


def test_cost_of_a_model():
    """Against a count by hand: one layer of 8 wide, 2 heads of 4, 2 groups, MLP 16, vocabulary 10, tied."""
    raw = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16}
    raw |= {"num_attention_heads": 2, "vocab_size": 10, "tie_word_embeddings": True}
    cost = SequenceCost.of_shape(shape_from_hf_config(raw))
    weights = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 + 8 + 10 * 8
    assert cost.linear == 6 * weights
    # Forward: two products of 2 operations over n * n / 2 pairs, 2 heads, 4 wide; backward twice that.
    assert cost.quadratic == 3 * 2 * 2 * 4 * 2 / 2


def test_cost_of_windows() -> None:
    """A layer of each kind: within its window a sequence costs as without one, beyond it every token the same."""
    full, half = shape_of("gemma3_text", layer_types=["full_attention"] * 2), shape_of("gemma3_text")
    whole, cost = SequenceCost.of_shape(full), SequenceCost.of_shape(half)
    assert cost.windows == ((8, cost.quadratic),) and whole.quadratic == 2 * cost.quadratic
    assert list(cost([1, 8])) == list(whole([1, 8]))
    left_out = sum(max(place - 8, 0) for place in range(1, 21))  # pairs of 20 tokens, by a count
    assert whole([20]) - cost([20]) == pytest.approx(cost.quadratic * 2 * left_out, rel=0.1)  # n² / 2 pairs of n tokens


@pytest.mark.parametrize(("needed", "room", "in_a_bin"), [(4106, 16384, 3), (7, 100, 14)])
def test_thousands_of_equal_samples_are_planned_at_once(needed, room, in_a_bin):
    """No room of a bin is a multiple of the samples': counting up from what all take together would be minutes."""
    needs = np.full((4096, 1), needed)
    start = time.process_time()
    bins = pack(needs, COST(needs[:, 0]), (room,))
    assert time.process_time() - start < here_s(5)
    assert (len(bins), max(map(len, bins))) == (-(-4096 // in_a_bin), in_a_bin)
