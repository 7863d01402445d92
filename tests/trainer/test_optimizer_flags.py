"""After a checkpoint was loaded, the flags decide rates and options, and the checkpoint the position; without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusionrl.cpu import megatron_patches
from fusionrl.trainer.optimizer_flags import OptimizerFlags


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Let Megatron be imported on a CPU."""
    megatron_patches.install()


def build(
    lr: float = 1e-3,
    style: str = "constant",
    length: int = 10,
    warm_up: int = 0,
    min_lr: float = 0.0,
    weight_decay: float = 0.0,
    **adam: Any,
) -> Any:
    """A model with an optimizer and a schedule, as `build_training` makes them of flags."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from fusionrl.trainer.adam import FusedAdam

    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": mult, "max_lr": lr, "min_lr": min_lr}
        for mult in (1.0, 0.0)
    ]
    optimizer = FusedAdam(groups, lr=lr, weight_decay=weight_decay, **adam)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warm_up,
        lr_decay_steps=length,
        lr_decay_style=style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=length,
        wd_incr_style="constant",
    )
    return SimpleNamespace(optimizer=optimizer, scheduler=scheduler)


def train(trained: Any, steps: int) -> list[float]:
    """Take steps; return the rate of each."""
    rates = []
    for _ in range(steps):
        for group in trained.optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        rates.append(trained.optimizer.param_groups[0]["lr"])
        trained.optimizer.step()
        trained.scheduler.step(1)
    return rates


def go_on(before: Any, now: Any) -> None:
    """Load what `before` saves into `now`, in the way of `ModelRank.load`."""
    flags = OptimizerFlags.of(now)
    now.optimizer.load_state_dict(before.optimizer.state_dict())
    now.scheduler.num_steps = before.scheduler.state_dict()["num_steps"]
    flags.restore(now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"style": "linear", "length": 3}, {"style": "linear", "length": 6}),
        ({"style": "linear", "length": 6}, {"style": "cosine", "length": 6, "min_lr": 1e-5}),
        ({"style": "cosine", "length": 6}, {}),
        ({}, {"lr": 1e-2}),
        ({}, {"warm_up": 5}),
        ({"warm_up": 2, "style": "linear"}, {"warm_up": 2, "style": "linear"}),
    ],
)
def test_the_rates_are_those_of_a_run_with_these_flags_from_its_start(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    first, resumed, whole = build(**before), build(**now), build(**now)
    train(first, 3)
    go_on(first, resumed)
    assert train(resumed, 3) == train(whole, 6)[3:]
    assert resumed.scheduler.num_steps == 6
    assert [group["step"] for group in resumed.optimizer.param_groups] == [6, 6], "Adam's own count is the checkpoint's"


def test_options_of_adam_are_those_of_the_flags() -> None:
    first = build(weight_decay=0.1)
    resumed = build(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.4, lr=1e-2)
    train(first, 2)
    go_on(first, resumed)
    for group, decay in zip(resumed.optimizer.param_groups, (0.4, 0.0), strict=True):
        found = {name: group[name] for name in ("betas", "eps", "weight_decay", "lr", "max_lr")}
        assert found == {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": decay, "lr": 1e-2, "max_lr": 1e-2}


def test_moments_are_those_of_the_checkpoint() -> None:
    first, resumed = build(), build()
    train(first, 2)
    go_on(first, resumed)
    states = [list(one.optimizer.state.values()) for one in (first, resumed)]
    for saved, loaded in zip(*states, strict=True):
        assert torch.equal(saved["exp_avg"], loaded["exp_avg"])
        assert torch.equal(saved["exp_avg_sq"], loaded["exp_avg_sq"])
