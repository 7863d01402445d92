"""Snapshots of ranks: put back bit by bit, and into fewer data-parallel ranks."""

from typing import Any

import pytest

from fusionrl.data.train_batch import joined
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.test_checkpoint import SCHEDULE, rollouts
from tests.trainer.trainer_worker import LocalRanks, Samples, config_of


@pytest.fixture(scope="module")
def fresh(forkserver):
    """Processes that have trained nothing."""
    pool = LocalRanks(2)
    yield pool
    pool.close()


def put(pool: LocalRanks, layout: TrainerLayout, states: list[Any]) -> None:
    """Give each rank what the driver gives it, own state first; `states`: of the ranks of `layout`."""
    now = pool._layout
    owns = [layout.rank(now.coordinates(rank)) for rank in range(now.world_size)]
    parts = [[states[own]] if now == layout else [states[own], *states[:own], *states[own + 1 :]] for own in owns]
    pool._all([("run", ("_put_states", part)) for part in parts])


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("qwen3", TrainerLayout(2), "bf16"),
        ("qwen3", TrainerLayout(2, tp=2), "fp32"),
        ("qwen3_moe", TrainerLayout(2, ep=2), "fp32"),
        ("qwen2", TrainerLayout(2, pp=2), "fp32"),
    ],
    ids=str,
)
def test_ranks_go_on_bit_by_bit(workers, fresh, hf, family, layout, precision) -> None:
    folder, _ = hf(family, True)
    config = config_of(folder, precision=precision, **SCHEDULE)
    workers.start(config, layout)
    rollouts(workers, layout, range(2))
    taken, at_snapshot = workers.call("snapshot"), workers.call("state_hashes")
    numbers, at_end = rollouts(workers, layout, range(2, 4)), workers.call("state_hashes")

    fresh.start(config, layout)
    put(fresh, layout, [state for _, state in taken])
    assert fresh.call("state_hashes") == at_snapshot != at_end
    assert rollouts(fresh, layout, range(2, 4)) == numbers
    assert fresh.call("state_hashes") == at_end
    assert fresh.call("last_trained") == [3, 3]


@pytest.mark.parametrize(("family", "precision"), [("qwen3", "bf16"), ("qwen3_moe", "fp32")], ids=str)
def test_one_rank_takes_the_place_of_two(workers, fresh, hf, family, precision) -> None:
    """Weights and moments are those of both ranks; the loss of their shards is the same but for rounding."""
    folder, _ = hf(family, True)
    config, layout = config_of(folder, precision=precision, **SCHEDULE), TrainerLayout(2)
    workers.start(config, layout)
    rollouts(workers, layout, range(2))
    taken, at_snapshot = workers.call("snapshot"), workers.call("state_hashes")
    numbers = rollouts(workers, layout, range(2, 4))

    smaller = layout.smaller(1)
    assert smaller == TrainerLayout(1)
    fresh.start(config, smaller)
    put(fresh, layout, [state for _, state in taken])
    assert fresh.call("state_hashes")[0]["weights"] == at_snapshot[0]["weights"]
    assert sum(num_bytes for num_bytes, _ in taken) == fresh.call("snapshot")[0][0]
    for number, expected in zip(range(2, 4), numbers, strict=True):
        found = fresh.train([joined(Samples(6, seed=number).shards(2, 2))], smaller, number)
        for name in ("train/loss", "train/grad_norm", "train/num_tokens", "train/num_samples", "train/lr"):
            assert found[name] == pytest.approx(expected[name], rel=2e-2 if precision == "bf16" else 1e-4), name


def test_smaller_layouts_divide_the_shards() -> None:
    eight = TrainerLayout(16, tp=2)
    assert [eight.smaller(n).dp for n in (15, 8, 7, 3, 2)] == [4, 4, 2, 1, 1]
    assert eight.smaller(1) is None
    assert TrainerLayout(8, ep=4).smaller(7) == TrainerLayout(4, ep=4)
    assert TrainerLayout(4, ep=4).smaller(3) is None, "experts need their ranks"
