"""Defaults that differ between Megatron's parser and its classes: the page lists them, and offloading means all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.config.config import PassThrough
from fusionrl.plan.memory.states import StateOptions
from tools.megatron_defaults import differences, parser_defaults

ROOT = Path(__file__).parents[2]


def test_differences_are_found() -> None:
    source = (
        "group.add_argument('--optimizer-offload-fraction', type=float, default=1.0)\n"
        "group.add_argument('--no-rope-fusion', action='store_false', dest='apply_rope_fusion')\n"
        "group.add_argument('--lr', type=float, default=None)\n"
        "group.add_argument('--hidden-size', type=int, default=computed())\n"
    )
    assert parser_defaults(source) == {"optimizer_offload_fraction": 1.0, "apply_rope_fusion": True, "lr": None}
    assert [row[1:] for row in differences(source)] == [
        ("apply_rope_fusion", False, True),
        ("optimizer_offload_fraction", 0.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({"optimizer_cpu_offload": True}, 1.0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 0.5),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0}, 0.0),
        ({"optimizer_cpu_offload": False}, 0.0),
        ({}, 0.0),
    ],
)
def test_offloading_means_the_whole_optimizer_unless_a_fraction_is_given(
    given: dict[str, object], share: float
) -> None:
    passed = PassThrough(optimizer=given)
    assert StateOptions.of("bf16", passed.optimizer, {}).host_share == share
    assert PassThrough.model_validate(passed.model_dump()) == passed
