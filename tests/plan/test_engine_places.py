"""The devices of engines: on one node, or over several."""

from __future__ import annotations

import pytest

from fusionrl.plan.engine_places import check_engine_size, place_engines, place_one_by_one


def test_an_engine_that_fits_on_a_node_spans_none() -> None:
    assert place_engines("--n", "--size", 6, 3, 2, 4) == ((4, 5, 6), (8, 9, 10))


def test_an_engine_larger_than_a_node_takes_whole_nodes() -> None:
    """With 2 trainers and 4 devices a node, the first engine begins on the second node."""
    assert place_engines("--n", "--size", 16, 8, 2, 4) == (tuple(range(4, 12)), tuple(range(12, 20)))
    assert place_one_by_one([8, 8], 2, 4) == (tuple(range(4, 12)), tuple(range(12, 20)))
    assert place_one_by_one([8], 0, 4) == (tuple(range(8)),), "colocated it has the trainers' nodes"


def test_engines_of_several_sizes_leave_devices_idle_before_they_span_nodes() -> None:
    assert place_one_by_one([1, 2, 2], 4, 4, may_skip=True) == ((4,), (5, 6), (8, 9))
    assert place_one_by_one([1, 2, 2], 4, 4) == ((4,), (5, 6), (7, 8))
    assert place_one_by_one([2, 8], 4, 4, may_skip=True) == ((4, 5), tuple(range(8, 16)))


def test_engines_of_the_policy_follow_one_another() -> None:
    assert place_one_by_one([2, 1], 1, 8) == ((1, 2), (3,))


def test_a_part_of_a_node_is_refused_with_the_sizes_that_do() -> None:
    with pytest.raises(ValueError, match=r"--size 6: .* whole ones, of --num-gpus-per-node 4 devices; take 4 or 8"):
        check_engine_size("--size", 6, 4)
    check_engine_size("--size", 3, 4)
    check_engine_size("--size", 12, 4)
