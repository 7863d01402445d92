"""The note on a warm-up says what the optimizer's schedule does."""

import re
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.plan.trainer_plan import lr_decay_steps, warm_up_notes

WARM_UP = {"lr_warmup_iters": 4, "lr": 1e-3}


@pytest.mark.parametrize(
    ("values", "num_steps", "parts"),
    [
        ({}, 10, []),
        (WARM_UP, 10, ["rate 0 at optimizer step 1, which changes no weights, 0.001 from step 5 .*--lr-warmup-init"]),
        (WARM_UP | {"lr_warmup_init": 1e-4}, 10, ["learning rate 0.0001 at optimizer step 1, 0.001 from step 5 on"]),
        (WARM_UP, 4, ["step 1", "--lr-warmup-iters 4: all 4 optimizer steps of the run"]),
        (WARM_UP | {"mode": "eval"}, 0, []),
        (WARM_UP | {"mode": "reject-sampling"}, 4, []),
    ],
)
def test_notes(values: dict[str, Any], num_steps: int, parts: list[str]) -> None:
    notes = warm_up_notes(Config.from_flat(values), num_steps)
    assert len(notes) == len(parts)
    assert all(re.search(part, note) for note, part in zip(notes, parts, strict=True)), notes


def test_the_length_of_the_decay() -> None:
    cosine: dict[str, Any] = {"lr_decay_style": "cosine"}
    for values, num_steps, wanted in (
        ({}, 12, 12),
        ({"lr_warmup_iters": 20}, 12, 21),  # Megatron wants a decay that is longer than the warm-up
        ({}, None, 1),
        (cosine, 12, 12),
        (cosine | {"lr_decay_iters": 7}, 12, 7),
    ):
        assert lr_decay_steps(Config.from_flat(values).train, num_steps) == wanted
    linear = {"lr_decay_style": "linear"}
    with pytest.raises(ValueError, match="the length of the run is not known; give --lr-decay-iters"):
        lr_decay_steps(Config.from_flat(linear).train, None)
    with pytest.raises(ValueError, match="--critic-lr-warmup-iters 12 is not below the 12 steps"):
        lr_decay_steps(Config.from_flat(linear | {"lr_warmup_iters": 12}).train, 12, "critic-")
