"""Memory given away and taken back: every bit as it was, and really gone in between."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fusionrl.cli.device import detect_device
from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.states import BLOCK, pinned_bytes
from fusionrl.trainer.host_memory import PinnedMemory
from fusionrl.trainer.model_rank import ModelRank
from tests.trainer.trainer_worker import Samples, config_of

BIG = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
WIDE = {name: BIG[name] for name in ("hidden_size", "intermediate_size", "head_dim")}


def resident(actor) -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def shares(actor) -> tuple[int, int]:
    """(bytes of gradients, bytes that are kept elsewhere), while all is away"""
    from fusionrl.trainer.host_memory import _zero

    chunks, offload = actor.trained.chunks, actor._offload
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    copies = (*offload._weights, *offload._rest)
    kept = sum(size for _, size, restore in copies if restore is not _zero)
    return sum(buffer.grad_data.nbytes for buffer in buffers), kept


def away(actor, keep_weights: bool = False) -> tuple[int, int]:
    """(bytes copied out, bytes by which the process became smaller)"""
    before = resident(actor)
    copied = actor.offload(keep_weights)
    return copied, before - resident(actor)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bit_for_bit_and_really_gone(workers, hf, precision, tmp_path):
    layout, shards = TrainerLayout(2), Samples(6, seed=2).shards(2)
    config = config_of(hf("qwen3", False, **BIG)[0], precision=precision, offload_folder=str(tmp_path))
    workers.start(config, layout)
    workers.train(shards)
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
    after = workers.train(shards, layout, 1)
    workers.start(config, layout)
    workers.train(shards)
    assert workers.train(shards, layout, 1) == after


def has_no_room(actor) -> None:
    """Take the memory back, a part of which does not fit at first."""
    offload = actor._offload

    def fails(storage: torch.UntypedStorage) -> None:
        raise MemoryError("no room")

    storage, size, restore = offload._rest[0]
    offload._rest[0] = storage, size, fails
    with pytest.raises(MemoryError, match="no room"):
        offload.reload()
    assert offload._rest and not offload._weights
    offload._rest[0] = storage, size, restore
    offload.reload()


def test_what_has_no_room_stays_away(workers, hf):
    config = config_of(hf("qwen3", False, **BIG)[0])
    workers.start(config, TrainerLayout(1))
    workers.train(Samples(2, seed=2).shards(1))
    before = workers.call("state_hashes")
    workers.call("offload")
    workers.run(has_no_room)
    assert workers.call("state_hashes") == before


def leaves(actor) -> set[bool]:
    """Whether the tensors that the optimizer moves are leaves of autograd."""
    optimizers = [inner.optimizer for inner in actor.trained.optimizer.chained_optimizers]
    return {param.is_leaf for one in optimizers for group in one.param_groups for param in group["params"]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_moves_leaves_alone(workers, hf, precision):
    """For --optimizer-cpu-offload Megatron builds an optimizer of them once more, and torch takes no others."""
    workers.start(config_of(hf("qwen3_5_text", False)[0], precision=precision))
    assert workers.run(leaves) == [{True}]


@pytest.mark.gpu
@pytest.mark.skipif(detect_device("auto") != "cuda", reason="no NVIDIA GPU on this machine")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])  # the latter has tensors in fp32
def test_the_optimizer_stays_on_the_host(workers, hf, tmp_path, family):
    """--optimizer-cpu-offload: the same numbers, saved and loaded, with the moments in host memory."""
    folder, shards, found, path = hf(family, False, **WIDE)[0], Samples(6, seed=2).shards(), [], str(tmp_path / "saved")
    for offload in (False, True):
        passed = {"optimizer": {"optimizer_cpu_offload": offload, "optimizer_offload_fraction": 1.0}}
        workers.start(config_of(folder, precision="bf16", passthrough=passed if offload else None))
        losses = [workers.train(shards, None, step)["train/loss"] for step in range(3)]
        workers.call("save", path, 2)
        hashes = workers.call("state_hashes")
        workers.train(shards, None, 3)
        workers.call("load", path)
        assert workers.call("state_hashes") == hashes
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_with_experts_and_stages(workers, hf, tmp_path):
    folder, _ = hf("qwen3_moe", False)
    for layout in (TrainerLayout(2, ep=2), TrainerLayout(2, pp=2)):
        workers.start(config_of(folder), layout)
        workers.train(Samples(6, seed=2).shards(layout.dp), layout)
        before = workers.call("state_hashes")
        assert all(copied > 0 for copied in workers.call("offload"))
        assert workers.call("state_hashes") == before


def kept_of_freed(actor) -> tuple[float, float]:
    """The share of a dropped tensor's memory that the process has: before it offloads, and after."""
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


class OldNccl:
    """NCCL's backend of a torch before 2.13."""

    def name(self) -> str:
        return "nccl"


class Nccl(OldNccl):
    """One that may be suspended once, and resumed only when it is suspended, as torch's; it notes both in `calls`."""

    def __init__(self, is_able: bool = True, calls: list[tuple[str, Nccl]] | None = None) -> None:
        self.is_able, self.is_suspended, self.calls = is_able, False, [] if calls is None else calls

    def suspend(self) -> None:
        if not self.is_able:
            raise RuntimeError("NCCL 2.28 has no ncclCommSuspend")
        assert not self.is_suspended
        self.is_suspended = True
        self.calls.append(("suspend", self))

    def resume(self) -> None:
        assert self.is_suspended
        self.is_suspended = False
        self.calls.append(("resume", self))


def test_groups_of_two_kinds(caplog):
    """A colocated run has NCCL's groups of Megatron and a gloo group for objects; it ended at its first reload."""
    megatron_patches.install()
    from fusionrl.trainer.host_memory import suspend_nccl

    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for verb in ("suspend", "resume"):
        with pytest.raises(RuntimeError, match=f"does not support {verb}"):
            getattr(gloo, verb)()
    first, second = Nccl(), Nccl()
    assert suspend_nccl([first, gloo, second]) == [first, second] and first.is_suspended and second.is_suspended
    for unable in (OldNccl(), Nccl(is_able=False)):
        with caplog.at_level(logging.INFO):
            assert suspend_nccl([gloo, unable]) == []
        assert "process groups keep their buffers" in caplog.text
        caplog.clear()


def test_what_was_suspended_is_resumed_once_and_in_order(monkeypatch):
    """Also by a rank that holds no weights, which are what else says that all is away."""
    megatron_patches.install()
    from fusionrl.trainer import host_memory

    calls = []
    backends = [Nccl(calls=calls), Nccl(calls=calls)]
    monkeypatch.setattr(host_memory, "backends_of_groups", lambda device: iter(backends))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    trained = SimpleNamespace(chunks=[], optimizer=SimpleNamespace(chained_optimizers=[]))
    memory = host_memory.Offload(trained, torch.device("cuda"))
    for method in (memory.offload, memory.offload, memory.reload, memory.reload):
        method()
    expected = [(verb, backend) for verb in ("suspend", "resume") for backend in backends]
    assert calls == expected
    # The end of a checkpoint is collective, and may come when the memory is away.
    rank = object.__new__(ModelRank)
    for is_away in (False, True):
        calls.clear()
        rank._offload, rank._saving = memory, SimpleNamespace(finish=lambda: calls.append("finish"))
        if is_away:
            memory.offload()
        rank.finish_save()
        assert calls == ([*expected[:2], *expected[2:], "finish", *expected[:2]] if is_away else ["finish"])


def kinds(actor) -> list[str]:
    """The backends that a rank's groups have for a GPU: on a CPU all of Megatron's are gloo's, which answers for it."""
    from fusionrl.trainer.host_memory import backends_of_groups

    return [backend.name() for backend in backends_of_groups(torch.device("cuda"))]


def test_groups_of_a_rank(workers, hf):
    workers.start(config_of(hf("qwen3", False)[0]), TrainerLayout(2))
    for found in workers.run(kinds):
        assert set(found) == {"gloo"} and len(found) > 3


# ------------------------------------------------------------------------------------------------ pinned memory
@pytest.mark.parametrize("block", [16, 64, 4096])
def test_every_byte_comes_back(block: int) -> None:
    """Also of tensors that lie over several blocks, and of types of any width. The blocks here are not pinned."""
    made: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    torch.manual_seed(1)
    tensors = [torch.randn(7, 5), torch.randn(3).bfloat16(), torch.arange(11), torch.zeros(0), torch.tensor(2.5)]
    memory = PinnedMemory(allocate, block)
    kept = [memory.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept, strict=True):
        copy.read(found := torch.empty_like(tensor))
        assert torch.equal(found, tensor)
    whole = sum(tensor.nbytes for tensor in tensors)
    assert made == [block] * -(-whole // block), "no block more than the bytes need"
    for tensor, copy in zip(tensors, kept, strict=True):
        copy.write(tensor + 1)
    kept[0].read(found := torch.empty_like(tensors[0]))
    assert torch.equal(found, tensors[0] + 1)


def test_the_plan_counts_blocks() -> None:
    """torch would take 16 GiB for 8 and a byte, and keep them."""
    assert BLOCK.bit_count() == 1, "torch rounds up to a power of two"
    assert [pinned_bytes(size) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]
    assert pinned_bytes(8 * 2**30 + 1) == 8 * 2**30 + BLOCK
