"""A push from real Megatron ranks to a real engine: what it then computes, and what follows when one side is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor, EngineSpec
from fusionrl.engines.external_engine import AttachedEngine
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push import EngineTarget
from fusionrl.weights.push import push_weights
from tests.tiny_model import make_tiny_qwen3
from tests.trainer.local_ranks import LocalRanks
from tests.trainer.trainer_worker import config_of
from tests.weights.faults import Faulty
from tests.weights.push_rank import Pusher
from tools.threaded import Threaded

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
HOST, KEY, PROMPT = "127.0.0.1", "a key of the test", [5, 9, 33, 77, 100, 20]
LIMIT_S = 100.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen3(folder / f"model{seed}", seed) for seed in (0, 1)]


@pytest.fixture
def ranks(forkserver: None) -> Iterator[list[LocalRanks]]:
    """Two ranks twice: those that are killed, and those after them."""
    pools = [LocalRanks(2), LocalRanks(2)]
    yield pools
    for pool in pools:
        pool.close()


def pushers(pool: LocalRanks) -> list[Any]:
    """Buckets of 100 kB, so that there are some."""
    return [Threaded(Pusher(pool, rank, 100_000, LIMIT_S)) for rank in range(2)]


def engine_of(path: Path, folder: Path) -> EngineActor:
    spec = EngineSpec(0, str(path), "cpu", "float32", 1, (), HOST, KEY, str(folder), 1, start_timeout_s=600.0)
    return EngineActor(spec)


def process_id(_: Any) -> int:
    return os.getpid()


def push(trainers: list[Any], target: EngineTarget, version: int, transport: str) -> dict[str, float]:
    return push_weights(
        trainers, [target], [], version=version, transport=transport, pause_mode="retract", timeout_s=LIMIT_S
    )


def assert_ends(trainers: list[Any], engine: EngineActor, victim: int, num_restarts: int, who: str) -> None:
    """A push in whose middle a process is killed ends in time, and names it."""
    faulty = Faulty(AttachedEngine(0, engine.url, 1, KEY), "update_weights_from_distributed", 2, victim)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=who):
        push(trainers, EngineTarget(0, Threaded(faulty), "", (0,), num_restarts), 100, "broadcast")
    assert time.monotonic() - start < LIMIT_S


def assert_serves(engine: EngineActor, path: Path, version: int) -> None:
    """Its log-probs are transformers' of the weights in `path`; a cache of other weights would show."""
    from transformers import AutoModelForCausalLM

    async def ask() -> Any:
        async with GenerateClient(engine.url, KEY, 120.0, 1) as client:
            params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            return await client.generate({"input_ids": PROMPT, "sampling_params": params})

    answer = asyncio.run(ask())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer.tokens.tolist()])).logits[0, len(PROMPT) - 1 : -1]
    want = logits.log_softmax(-1).gather(1, torch.from_numpy(answer.tokens.astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(answer.log_probs, want.numpy(), atol=1e-4)
    assert answer.weight_versions == [(version, 8)]


def test_whoever_is_killed_in_the_middle_of_a_push_the_next_one_works(
    forked_engines: None, models: list[Path], ranks: list[LocalRanks], tmp_path: Path
) -> None:
    """Before and after by either executor, from two stages, over the weights of another model: first the engine is
    killed, and starts again; then a trainer rank, whose engine goes on with the ranks after it."""
    ranks[0].start(config_of(models[1]), TrainerLayout(2, pp=2))
    trainers = pushers(ranks[0])
    engine = engine_of(models[0], tmp_path)
    try:
        engine.start()
        assert_serves(engine, models[0], 0)
        target = EngineTarget(0, Threaded(AttachedEngine(0, engine.url, 1, KEY)), "", (0,))
        for version, transport in ((1, "broadcast"), (2, "ipc"), (3, "broadcast")):
            metrics = push(trainers, target, version, transport)
            assert_serves(engine, models[1], version)
            assert metrics["sync/buckets"] > 2
            assert metrics["sync/transfer_s"] <= metrics["sync/pause_s"]
        assert engine._server is not None
        pid = engine._server.pid
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert_ends(trainers, engine, pid, 0, "engine 0")
        assert not psutil.wait_procs(family, timeout=30)[1], "its processes end with it"
        engine.shutdown()
        engine.start()
        restarted = EngineTarget(0, Threaded(AttachedEngine(0, engine.url, 1, KEY)), "", (0,), num_restarts=1)
        push(trainers, restarted, 5, "broadcast")
        assert_serves(engine, models[1], 5)

        survivor, victim = ranks[0].run(process_id)
        assert_ends(trainers, engine, victim, 1, "trainer")
        psutil.Process(survivor).kill()  # as the run, which ends
        ranks[1].start(config_of(models[0]), TrainerLayout(2, pp=2))
        push(pushers(ranks[1]), restarted, 7, "broadcast")
        assert_serves(engine, models[0], 7)
    finally:
        engine.shutdown()
