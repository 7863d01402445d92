"""Mixtures: exact proportions, epochs of their own, and nothing but counts to restore."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrl.data.prompts import Mixture, PromptSequence
from fusionrl.data.sample import Sample


def sequence(name: str, count: int, seed: tuple[int, int] | None = None) -> PromptSequence:
    return PromptSequence([Sample(prompt=f"{name}{i}") for i in range(count)], seed)


def mixture(sizes: list[int], weights: list[float] | None = None, seed: int | None = None) -> Mixture:
    made = [sequence("abcdefgh"[k], size, None if seed is None else (seed, k)) for k, size in enumerate(sizes)]
    return Mixture(made, weights)


def take(mixed: Mixture | PromptSequence, count: int) -> list[str]:
    return [str(mixed.draw().prompt) for _ in range(count)]


weight_lists = st.lists(st.integers(1, 40).map(lambda n: n / 10), min_size=1, max_size=6)


@settings(max_examples=30)
@given(weight_lists, st.integers(1, 200))
def test_no_set_runs_ahead_of_its_share(weights: list[float], num_draws: int) -> None:
    mixed = mixture([3] * len(weights), weights)
    shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
    for number in range(1, num_draws + 1):
        mixed.draw()
        ahead = [one.num_drawn - share * number for one, share in zip(mixed.sequences, shares, strict=True)]
        assert sum(ahead) == 0 and max(ahead) < 1
        if all((share * number).denominator == 1 for share in shares):
            assert ahead == [0] * len(shares), "exact wherever it can be"


def test_without_weights_one_epoch_serves_each_prompt_once() -> None:
    mixed = mixture([3, 12, 5], seed=1)
    for _ in range(3):
        prompts = take(mixed, 20)
        assert len(set(prompts)) == 20
        assert Counter(p[0] for p in prompts) == {"a": 3, "b": 12, "c": 5}
        assert "a" in {p[0] for p in prompts[:7]}, "spread over the epoch, not one set after another"


def test_each_set_has_epochs_of_its_own() -> None:
    mixed = mixture([2, 8], [0.5, 0.5], seed=0)
    prompts = take(mixed, 16)
    assert Counter(p for p in prompts if p[0] == "a") == {"a0": 4, "a1": 4}
    assert Counter(p for p in prompts if p[0] == "b") == {f"b{i}": 1 for i in range(8)}
    assert [one.num_drawn for one in mixed.sequences] == [8, 8]


def test_orders_differ_by_seed_epoch_and_set() -> None:
    drawn = [take(sequence("a", 30, seed), 60) for seed in itertools.product((0, 1), (0, 1))]
    orders = [order for prompts in drawn for order in (tuple(prompts[:30]), tuple(prompts[30:]))]
    assert all(sorted(order) == sorted(orders[0]) for order in orders) and len(set(orders)) == 8


def test_the_first_sets_order_is_that_of_seed_and_epoch_alone() -> None:
    """So a run over one set goes on as before when a second one is thought of."""
    wanted = [f"a{i}" for epoch in (0, 1) for i in np.random.default_rng([42, epoch]).permutation(9)]
    assert take(sequence("a", 9, (42, 0)), 18) == wanted


@settings(max_examples=20)
@given(st.integers(0, 60))
def test_the_counts_restore_everything(num_before: int) -> None:
    first = mixture([4, 7], [0.31, 0.69], seed=3)
    take(first, num_before)
    second = mixture([4, 7], [0.31, 0.69], seed=3)
    for old, new in zip(first.sequences, second.sequences, strict=True):
        new.num_drawn = old.num_drawn
    assert take(second, 25) == take(first, 25)
