"""The note on a warm-up says what the optimizer's schedule does."""

from __future__ import annotations

from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.plan.schedule import warm_up_notes


@pytest.mark.parametrize(
    ("values", "num_steps", "parts"),
    [
        ({}, 10, []),
        (
            {"lr_warmup_iters": 4, "lr": 1e-3},
            10,
            [
                [
                    "learning rate 0 at optimizer step 1, which changes no weights, 0.001 from step 5 on",
                    "--lr-warmup-init",
                ]
            ],
        ),
        (
            {"lr_warmup_iters": 4, "lr": 1e-3, "lr_warmup_init": 1e-4},
            10,
            [["learning rate 0.0001 at optimizer step 1, 0.001 from step 5 on"]],
        ),
        ({"lr_warmup_iters": 4}, 4, [["step 1"], ["--lr-warmup-iters 4: all 4 optimizer steps of the run"]]),
        ({"lr_warmup_iters": 4, "mode": "eval"}, 0, []),
        ({"lr_warmup_iters": 4, "mode": "reject-sampling"}, 4, []),
    ],
)
def test_notes(values: dict[str, Any], num_steps: int, parts: list[list[str]]) -> None:
    found = warm_up_notes(Config.from_flat(values), num_steps)
    assert len(found) == len(parts)
    for note, wanted in zip(found, parts, strict=True):
        assert all(part in note for part in wanted), note
