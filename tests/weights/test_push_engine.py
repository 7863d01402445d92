"""A push from real Megatron ranks to a real engine: what it then computes, and what follows when one side is killed."""

import asyncio
import importlib.util
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor
from fusionrl.engines.external_engine import AttachedEngine
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.push import Push
from fusionrl.weights.verify import compare_checksums
from tests.engines.real_engine import KEY, log_probs, real_engine
from tests.tiny_model import make_tiny_qwen3
from tests.trainer.local_ranks import LocalRanks
from tests.trainer.trainer_worker import config_of, draw_adapters, merge_drawn
from tests.weights.faults import Faulty
from tests.weights.push_rank import Pusher, checksums
from tools.threaded import Threaded

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
PROMPT = [5, 9, 33, 77, 100, 20]
LIMIT_S = 100.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen3(folder / f"model{seed}", seed) for seed in (0, 1)]


def pushers(pool: LocalRanks) -> list[Any]:
    """Buckets of 100 kB, so that there are some."""
    return [Threaded(Pusher(pool, rank, 100_000, LIMIT_S)) for rank in range(2)]


def process_id(_: Any) -> int:
    return os.getpid()


def push(trainers: list[Any], target: EngineTarget, version: int) -> dict[str, float]:
    return Push(trainers, [target], version, LIMIT_S).from_memory([], "broadcast", "retract")


def assert_ends(trainers: list[Any], target: EngineTarget, attached: AttachedEngine, victim: int, who: str) -> None:
    """A push in whose middle a process is killed ends in time, and names it."""
    faulty = Faulty(attached, "update_weights_from_distributed", 2, victim)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=who):
        push(trainers, replace(target, handle=Threaded(faulty)), 100)
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
    wanted = log_probs(model, PROMPT + answer.tokens.tolist(), len(PROMPT))
    np.testing.assert_allclose(answer.log_probs, wanted, atol=1e-4)
    assert answer.weight_versions == [(version, 8)]


def test_the_next_push_works_whoever_is_killed_in_the_middle_of_one(
    forked_engines: None, models: list[Path], forkserver: None, tmp_path: Path
) -> None:
    """First the engine, which starts again; then a rank, whose engine goes on with other ranks.

    Before that from two stages over the weights of another model. Every executor: test_push_matrix.py.
    """
    first, second = LocalRanks(2), LocalRanks(2)
    engine = real_engine(models[0], tmp_path)
    try:
        first.start(config_of(models[1]), TrainerLayout(2, pp=2))
        trainers = pushers(first)
        engine.start()
        assert_serves(engine, models[0], 0)
        attached = AttachedEngine(0, engine.url, 1, KEY)
        target = EngineTarget(0, Threaded(attached), "", (0,))
        metrics = push(trainers, target, 1)
        assert_serves(engine, models[1], 1)
        assert metrics["sync/buckets"] > 2 and metrics["sync/transfer_s"] <= metrics["sync/pause_s"]

        assert engine._server is not None
        server = psutil.Process(engine._server.pid)
        family = [server, *server.children(recursive=True)]
        assert_ends(trainers, target, attached, server.pid, "engine 0")
        assert not psutil.wait_procs(family, timeout=30)[1], "its processes end with it"
        engine.shutdown()
        engine.start()
        attached = AttachedEngine(0, engine.url, 1, KEY)
        target = EngineTarget(0, Threaded(attached), "", (0,), num_restarts=1)
        push(trainers, target, 2)
        assert_serves(engine, models[1], 2)

        survivor, victim = first.run(process_id)
        assert_ends(trainers, target, attached, victim, "trainer")
        psutil.Process(survivor).kill()  # as the run, which ends
        config = config_of(models[0], lora_rank=4)  # the layout with parts of adapters; they are added to the weights
        second.start(config, TrainerLayout(2, tp=2))
        second.run(draw_adapters)
        push(pushers(second), target, 3)
        assert_serves(engine, merge_drawn(models[0], config, tmp_path / "merged"), 3)
        (held,) = attached.weight_checksums() or []
        assert compare_checksums(second.run(checksums)[0], held) == []
    finally:
        engine.shutdown()
        first.close()
        second.close()
