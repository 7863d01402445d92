"""The trainer's layout: Megatron's order of ranks, and sizes that cannot be."""

from __future__ import annotations

import itertools

import pytest

from fusionrl.plan.layout import RankCoordinates, TrainerLayout


def test_order_of_ranks_is_tp_cp_dp_pp():
    layout = TrainerLayout(24, tp=2, cp=2, pp=3)
    assert layout.dp == 2
    assert layout.expert_dp == 8
    expected = [
        RankCoordinates(tp=tp, cp=cp, dp=dp, pp=pp)
        for pp, dp, cp, tp in itertools.product(range(3), range(2), range(2), range(2))
    ]
    assert [layout.coordinates(rank) for rank in range(24)] == expected
    assert [layout.rank(coordinates) for coordinates in expected] == list(range(24))
    assert layout.ranks_of_dp(1) == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert [layout.dp_rank(rank) for rank in (0, 3, 4, 23)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 4, "tp": 3}, "tp 3 × pp 1 × cp 1 does not divide"),
        ({"world_size": 4, "ep": 3}, "etp 1 × ep 3 × pp 1 does not divide"),
        ({"world_size": 4, "pp": 0}, "--pipeline-model-parallel-size is 0"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        TrainerLayout(**sizes)


def test_no_such_rank():
    with pytest.raises(ValueError, match="rank 4 is not one of the 4 ranks"):
        TrainerLayout(4).coordinates(4)
