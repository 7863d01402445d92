"""Memory given away and taken back: every bit as it was, and really gone in between."""

from __future__ import annotations

import pytest

from fusionrl.cli.device import detect_device
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.trainer_worker import Samples, config_of

BIG = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}


def resident(actor) -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def shares(actor) -> tuple[int, int]:
    """(bytes of gradients, bytes that are kept elsewhere), while all is away"""
    chunks = actor.trained.chunks
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return sum(buffer.grad_data.nbytes for buffer in buffers), actor._offload.kept_bytes


def away(actor, keep_weights: bool = False) -> tuple[int, int]:
    """(bytes copied out, bytes by which the process became smaller)"""
    before = resident(actor)
    copied = actor.offload(keep_weights)
    return copied, before - resident(actor)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bit_for_bit_and_really_gone(workers, hf, precision, tmp_path):
    folder, _ = hf("qwen3", False, **BIG)
    layout = TrainerLayout(2)
    config = config_of(folder, precision=precision, offload_folder=str(tmp_path))
    workers.start(config, layout)
    samples = Samples(6, seed=2)
    workers.train(samples.shards(2), layout)
    before = workers.call("state_hashes")
    given = workers.run(away)
    for copied, smaller in given:
        # fp32: weights and gradients whole, two moments by halves; bf16: also half a master copy.
        assert copied > 20e6
        assert smaller > 0.8 * copied
    assert workers.call("offload") == [0, 0]  # it is away already
    # Every step begins with gradients of zero: nobody keeps them.
    for (copied, _), (gradients, kept) in zip(given, workers.run(shares), strict=True):
        assert gradients > 10e6 and kept == copied - gradients
    assert list(tmp_path.iterdir()) == []  # the files have no name that could be left behind
    assert workers.call("state_hashes") == before
    # With the weights kept, they alone are there.
    partly = [copied for copied, _ in workers.run(away, True)]
    rest = [copied for copied, _ in workers.run(away)]
    assert all(0 < weights < others for weights, others in zip(rest, partly, strict=True))
    # Training takes everything back by itself, and goes on as if nothing had been.
    workers.call("offload")
    after = workers.train(samples.shards(2), layout, 1)
    workers.start(config, layout)
    workers.train(samples.shards(2), layout)
    assert workers.train(samples.shards(2), layout, 1) == after


@pytest.mark.gpu
@pytest.mark.skipif(detect_device("auto") != "cuda", reason="no NVIDIA GPU on this machine")
def test_the_optimizer_stays_on_the_host(workers, hf, tmp_path):
    """--optimizer-cpu-offload: the same numbers, saved and loaded, with the moments in host memory."""
    folder, _ = hf("qwen3", False, **BIG)
    samples = Samples(6, seed=2)
    found = []
    for offload in (False, True):
        passed = {"optimizer": {"optimizer_cpu_offload": offload, "optimizer_offload_fraction": 1.0}}
        workers.start(config_of(folder, precision="bf16", passthrough=passed if offload else None))
        losses = [workers.train(samples.shards(), None, step)["train/loss"] for step in range(3)]
        workers.call("save", str(tmp_path / f"checkpoint-{offload}"), 2)
        hashes = workers.call("state_hashes")
        workers.train(samples.shards(), None, 3)
        workers.call("load", str(tmp_path / f"checkpoint-{offload}"))
        assert workers.call("state_hashes") == hashes
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_with_experts_and_stages(workers, hf, tmp_path):
    folder, _ = hf("qwen3_moe", False)
    for layout in (TrainerLayout(2, ep=2), TrainerLayout(2, pp=2)):
        workers.start(config_of(folder), layout)
        samples = Samples(6, seed=2)
        workers.train(samples.shards(layout.dp), layout)
        before = workers.call("state_hashes")
        assert all(copied > 0 for copied in workers.call("offload"))
        assert workers.call("state_hashes") == before


def kept_of_freed(actor) -> tuple[float, float]:
    """The share of a dropped tensor's memory that the process has: before it offloads, and after."""
    import torch

    before = resident(actor)
    size = torch.ones(2**24).nbytes  # dropped at once
    kept = resident(actor) - before
    actor.offload(False)
    return kept / size, (resident(actor) - before) / size


@pytest.mark.skipif(detect_device("auto") == "cuda", reason="a GPU's memory is torch's own")
def test_what_a_step_frees_is_kept_until_the_memory_is_given_away(workers, hf):
    workers.start(config_of(hf("qwen3", False)[0]))
    ((kept, after),) = workers.run(kept_of_freed)
    assert kept > 0.9 and after < 0.5
