"""Several adapters side by side: each learns, is saved and comes back as in a run of its own, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.data.train_batch import TrainShard
from fusionrl.plan.layout import TrainerLayout
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import LocalRanks, Samples, config_of

FLAGS: dict[str, Any] = {"lora_rank": 4, "lora_dropout": 0.1, "use_kl_loss": True, "clip_grad": 1.0}
FLAGS |= {"lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2, "weight_decay": 0.01}
SEEDS: dict[str, Sequence[int | None]] = {"math": (1, None, 3, 4), "code": (5, 6, None, 8)}
"""Adapter → of each rollout the seed of its samples; None: it has none."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def lent_adapters(actor: Any) -> dict[str, dict[str, Any]]:
    """Return what a push exports of each adapter."""
    found = {}
    for name in SEEDS:
        with actor.lent_adapter(name):
            found[name] = trainer_worker.adapters(actor)
    return found


def shards(name: str, rollout: int, dp: int) -> list[TrainShard]:
    """Return an adapter's shards of a rollout, of another size and number of steps each."""
    seed = SEEDS[name][rollout]
    assert seed is not None
    return [replace(shard, adapter=name) for shard in Samples(4 + 2 * (seed % 2), seed).shards(dp, 1 + seed % 2)]


def train_all(ranks: LocalRanks, rollout: int, dp: int) -> list[dict[str, float]]:
    """Train the adapters that have samples; the metrics of each rank."""
    names = [name for name, seeds in SEEDS.items() if seeds[rollout] is not None]
    of_ranks = zip(*(shards(name, rollout, dp) for name in names), strict=True)
    return ranks.on_shards("train", [list(of_rank) for of_rank in of_ranks], rollout_id=rollout)  # type: ignore


@pytest.mark.parametrize(
    ("layout", "precision", "ddp"),
    [
        (TrainerLayout(1), "fp32", {}),
        (TrainerLayout(2, tp=2), "bf16", OVERLAP),  # with sequence parallelism
        (TrainerLayout(2, pp=2), "fp32", {}),
        (TrainerLayout(2), "bf16", OVERLAP),
    ],
    ids=str,
)
def test_each_is_that_of_a_run_of_its_own(
    workers: LocalRanks, hf: Any, tmp_path: Path, layout: TrainerLayout, precision: str, ddp: dict[str, bool]
) -> None:
    def config(**values: Any) -> Any:
        return config_of(hf("qwen3", False)[0], precision=precision, passthrough={"ddp": ddp}, **FLAGS, **values)

    alone: dict[str, list[Any]] = {}
    for name, seeds in SEEDS.items():
        workers.start(config(), layout)
        for rollout, seed in enumerate(seeds):
            if seed is not None:
                metrics = workers.on_shards("train", shards(name, rollout, layout.dp), rollout_id=rollout)
                alone.setdefault(f"{name} metrics", []).append(metrics[0])
        alone[name], alone[f"{name} values"] = workers.call("state_hashes"), workers.run(trainer_worker.adapters)
    workers.start(config(lora_adapters=list(SEEDS), async_save=True), layout)
    path, found = str(tmp_path / "checkpoint"), []
    for rollout in range(4):
        found.append(train_all(workers, rollout, layout.dp)[0])
        if rollout == 1:
            workers.call("begin_save", path, rollout)
    workers.call("finish_save")
    for rank, values in enumerate(workers.run(lent_adapters)):
        for name in SEEDS:
            for matrix, value in values[name].items():
                assert np.array_equal(value, alone[f"{name} values"][rank][matrix]), f"{matrix} of {name}, as pushed"
    side_by_side = workers.call("state_hashes")
    for rank, hashes in enumerate(side_by_side):
        for name in SEEDS:
            for kind in ("weights", "optimizer", "rng"):
                assert hashes[f"{kind} of {name}"] == alone[name][rank][kind], f"{kind} of {name} on rank {rank}"  # type: ignore
    for name in SEEDS:
        own = [row for row in found if f"adapter/{name}/loss" in row]
        for row, wanted in zip(own, alone[f"{name} metrics"], strict=True):
            for metric in ("loss", "grad_norm", "lr"):
                assert row[f"adapter/{name}/{metric}"] == wanted[f"train/{metric}"]
    alike = found[1], alone["code metrics"][1]  # of a rollout in which one adapter has samples
    assert all(alike[0][metric] == value for metric, value in alike[1].items())

    workers.start(config(lora_adapters=list(SEEDS)), layout)
    (restored, *_) = workers.call("load", path)
    assert restored["rollout_id"] == 1 and restored["rng_restored"]  # type: ignore
    for rollout in range(2, 4):
        assert train_all(workers, rollout, layout.dp)[0] == found[rollout]
    assert workers.call("state_hashes") == side_by_side


def test_adapters_start_from_their_folders(workers: LocalRanks, hf: Any, tmp_path: Path) -> None:
    """Folders that a run has written are read for each of several adapters, and for the only one."""
    flags: dict[str, Any] = FLAGS | {"lora_dropout": 0.0}
    workers.start(config_of(hf("qwen3", False)[0], **flags, lora_adapters=list(SEEDS)))
    train_all(workers, 0, 1)
    train_all(workers, 1, 1)
    workers.call("save_hf", str(tmp_path / "out"))
    (wanted,) = workers.run(lent_adapters)
    for names in (["code", "math"], ["math"]):
        folders = [f"{name}={tmp_path / 'out' / name}" for name in names]
        workers.start(config_of(hf("qwen3", False)[0], precision="bf16", **flags, lora_adapters=folders))
        (found,) = workers.run(lent_adapters)
        for name in names:
            for matrix, value in found[name].items():
                assert np.allclose(value, wanted[name][matrix], rtol=2**-8), f"{matrix} of {name}"
        if len(names) > 1:
            train_all(workers, 3, 1)
        (after,) = workers.run(lent_adapters)
        for name in names:
            moved = max(np.abs(after[name][matrix] - found[name][matrix]).max() for matrix in found[name])
            assert moved < 0.01, f"{name} continues from its folder, not from other master weights"
