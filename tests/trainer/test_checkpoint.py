"""Checkpoints: a run that is stopped and goes on is, bit by bit, the run that was not stopped."""

import errno
import io
import os
import signal
import socket
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.checkpoint_io import WriterProcess
from tests.trainer import trainer_worker
from tests.trainer.trainer_worker import Failed, LocalRanks, Samples, config_of

SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2, "weight_decay": 0.01}
SCHEDULE |= {"clip_grad": 1.0}


def rollouts(workers, layout, numbers):
    return [workers.train(Samples(6, seed=i).shards(layout.dp, 2), layout, i) for i in numbers]


@pytest.fixture(scope="module")
def fresh(forkserver):
    """Processes that have trained nothing, for loading what others saved."""
    pool = LocalRanks(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("qwen3", TrainerLayout(1), "fp32"),
        ("qwen3", TrainerLayout(2), "bf16"),
        ("qwen3_5_text", TrainerLayout(2, tp=2), "bf16"),  # tensors of two types
        ("qwen2", TrainerLayout(2, pp=2), "fp32"),  # a tied embedding, in a bucket of its own behind a padded one
    ],
    ids=str,
)
def test_resume_is_bit_exact(workers, fresh, hf, tmp_path, family, layout, precision):
    folder, _ = hf(family, True)
    config = config_of(folder, precision=precision, use_kl_loss=True, **SCHEDULE)
    path = str(tmp_path / "checkpoint")
    workers.start(config, layout)
    rollouts(workers, layout, range(2))
    workers.call("save", path, 1)
    at_save = workers.call("state_hashes")
    uninterrupted = rollouts(workers, layout, range(2, 4))
    at_end = workers.call("state_hashes")

    fresh.start(config, layout)
    restored = fresh.call("load", path)[0]
    assert restored == {"rollout_id": 1, "optimizer_steps": 4, "skipped": 0, "rng_restored": True}
    assert fresh.call("state_hashes") == at_save
    assert rollouts(fresh, layout, range(2, 4)) == uninterrupted
    assert fresh.call("state_hashes") == at_end
    assert at_end != at_save


def _norms(actor: Any) -> list[str]:
    """Names in a checkpoint of the norms before attention and MLP."""
    from fusionrl.trainer.checkpoint import _weights_state

    (state,) = _weights_state(actor.trained.chunks).values()
    return sorted(
        tensor.key for tensor in state.values() if "input_layernorm" in tensor.key or "layer_norm" in tensor.key
    )


@pytest.mark.parametrize("family", ["qwen3_5_text", "short_conv"])
def test_norms_have_the_names_of_transformer_engines_layers(workers, hf, family):
    """Also before a layer that has none in its projection: a checkpoint of a CPU loads on a GPU."""
    workers.start(config_of(hf(family, False)[0]))
    layer, attention, mlp = (
        "decoder.layers.",
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    )
    wanted = [f"{layer}0.input_layernorm.weight", f"{layer}0.{mlp}", f"{layer}1.{mlp}", f"{layer}1.{attention}"]
    assert workers.run(_norms)[0] == wanted


def _options(actor: Any) -> list[dict[str, Any]]:
    """The options with which the next step of this rank is taken."""
    names = ("step", "max_lr", "min_lr", "weight_decay", "betas", "eps")
    return [{name: group[name] for name in names} for group in actor.trained.optimizer.param_groups]


OTHERS = {"lr": 5e-3, "min_lr": 1e-4, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
OTHERS |= {"weight_decay": 0.3, "clip_grad": 0.1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"lr_decay_style": "linear", "lr_decay_iters": 4}, {"lr_decay_style": "linear", "lr_decay_iters": 8}),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 8}, {}),
        ({}, {"lr_decay_style": "cosine", "lr_decay_iters": 12, "lr_warmup_iters": 2} | OTHERS),
    ],
    ids=["longer", "constant", "all"],
)
def test_a_resume_takes_the_schedule_and_options_of_its_flags(workers, hf, tmp_path, before, after):
    """As if the run had had these flags from its start: position and moments are the checkpoint's, the rest is not."""
    folder, _ = hf("qwen2", True)
    layout, path = TrainerLayout(2), str(tmp_path / "checkpoint")
    workers.start(config_of(folder, **before), layout)
    rollouts(workers, layout, range(2))
    workers.call("save", path, 1)
    hashes = workers.call("state_hashes")

    config = config_of(folder, verify_checkpoints=True, **after)
    workers.start(config, layout)
    wanted = [[group | {"step": 4} for group in rank] for rank in workers.run(_options)]
    restored = workers.call("load", path)
    assert [facts["hashes"] for facts in restored] == hashes, "--verify-checkpoints compares what was saved"
    assert workers.run(_options) == wanted
    rates = [metrics["train/lr"] for metrics in rollouts(workers, layout, range(2, 4))]

    workers.start(config, layout)
    whole = [metrics["train/lr"] for metrics in rollouts(workers, layout, range(4))]
    assert rates == whole[2:]
    assert min(rates) > 0


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("qwen2", TrainerLayout(1), TrainerLayout(2)),
        ("qwen2", TrainerLayout(2, tp=2), TrainerLayout(2, pp=2)),
        ("qwen3", TrainerLayout(2, pp=2, vpp=2), TrainerLayout(2, cp=2)),
        ("qwen3_moe", TrainerLayout(1), TrainerLayout(2, ep=2)),
        ("qwen3_moe", TrainerLayout(2, ep=2), TrainerLayout(2, tp=2, etp=2)),
        ("deepseek_v3", TrainerLayout(2, tp=2, etp=2), TrainerLayout(2, ep=2)),
        ("olmo2", TrainerLayout(2, tp=2), TrainerLayout(2, pp=2)),
        ("qwen3_5_text", TrainerLayout(2, tp=2), TrainerLayout(2, cp=2)),
    ],
    ids=str,
)
def test_another_layout_goes_on_with_the_same_numbers(workers, hf, tmp_path, family, saved, loaded):
    folder, _ = hf(family, family == "qwen2", vocab_size=121, num_hidden_layers=2 * max(saved.vpp, 1))
    path = str(tmp_path / "checkpoint")
    workers.start(config_of(folder, **SCHEDULE), saved)
    rollouts(workers, saved, range(2))
    workers.call("save", path, 1)
    want, weights = rollouts(workers, saved, [2, 3]), workers.run(trainer_worker.weights)[0]
    workers.start(config_of(folder, **SCHEDULE), loaded)
    assert workers.call("load", path)[0]["rng_restored"] is False
    for got, expected in zip(rollouts(workers, loaded, [2, 3]), want, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, tensor in workers.run(trainer_worker.weights)[0].items():
        assert np.abs(tensor - weights[name]).max() <= 1e-5, name


def test_saving_again_replaces_and_leaves_nothing_behind(workers, hf, tmp_path):
    workers.start(config_of(hf("llama", True)[0]))
    path, partial = tmp_path / "checkpoint", tmp_path / "checkpoint.partial"
    partial.mkdir()  # of a run that was killed while it saved
    (partial / "junk").write_text("x")
    workers.call("save", str(path), 1)
    rollouts(workers, TrainerLayout(1), [0])
    hashes = workers.call("state_hashes")
    workers.call("save", str(path), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
    assert not (path / "junk").exists()
    rollouts(workers, TrainerLayout(1), [1])
    assert workers.call("load", str(path))[0]["rollout_id"] == 2
    assert workers.call("state_hashes") == hashes


# --- asynchronous ---
def _wait_until_saved(actor: Any) -> bool:
    deadline = time.monotonic() + 60
    while not actor.is_saved() and time.monotonic() < deadline:
        time.sleep(0.05)
    return actor.is_saved()


def _kill_writer(actor: Any) -> None:
    if actor.rank == 1:
        os.kill(actor._writer._process.pid, signal.SIGKILL)


def test_training_goes_on_while_a_copy_is_written(workers, fresh, hf, tmp_path):
    """What is saved is what was there when the save began, and training is what it is without one."""
    folder, _ = hf("qwen3", True)
    layout, flags = TrainerLayout(2, tp=2), {"precision": "bf16", **SCHEDULE}
    path = str(tmp_path / "checkpoint")
    workers.start(config_of(folder, async_save=True, **flags), layout)
    rollouts(workers, layout, [0])
    at_save = workers.call("state_hashes")
    workers.call("begin_save", path, 0)
    after = rollouts(workers, layout, [1, 2])
    at_end = workers.call("state_hashes")
    assert workers.run(_wait_until_saved) == [True, True]
    assert not (tmp_path / "checkpoint").exists(), "it is published by finish_save, not before"
    workers.call("finish_save")

    fresh.start(config_of(folder, **flags), layout)
    assert fresh.call("load", path)[0]["rollout_id"] == 0
    assert fresh.call("state_hashes") == at_save
    assert rollouts(fresh, layout, [1, 2]) == after
    assert fresh.call("state_hashes") == at_end
    assert at_save != at_end


@pytest.mark.parametrize("writer", [False, True], ids=["at-once", "async"])
def test_a_disk_that_is_full_leaves_the_one_before(workers, hf, tmp_path, writer):
    """Every rank is told, and none waits; the run that catches it could even go on and save again."""
    layout, path = TrainerLayout(2, tp=2), tmp_path / "checkpoint"
    workers.start(config_of(hf("qwen3", True)[0], async_save=writer, **SCHEDULE), layout)
    workers.call("save", str(path), 0)
    hashes = workers.call("state_hashes")
    workers.run(trainer_worker.limit_files, 1, 10_000, writer)
    rollouts(workers, layout, [1])
    try:
        with pytest.raises(Failed, match=r"trainer rank 1 could not write its files .*File too large") as failure:
            workers.call("save", str(path), 1)
    finally:
        workers.run(trainer_worker.limit_files, 1, -1, writer)
    assert failure.value.kind == "OSError" and "nothing was published" in failure.value.message
    assert workers.call("load", str(path))[0]["rollout_id"] == 0
    assert workers.call("state_hashes") == hashes
    workers.call("save", str(path), 2)
    assert workers.call("load", str(path))[0]["rollout_id"] == 2


def test_a_writer_that_is_killed_is_an_error(workers, hf, tmp_path):
    path = tmp_path / "checkpoint"
    workers.start(config_of(hf("llama", True)[0], async_save=True), TrainerLayout(2))
    workers.call("save", str(path), 0)
    workers.run(_kill_writer)
    with pytest.raises(Failed, match=r"rank 1 could not write .*the process that writes checkpoints is gone"):
        workers.call("save", str(path), 1)
    assert workers.call("load", str(path))[0]["rollout_id"] == 0


def test_saves_wait_in_the_writer_and_each_has_its_own_answer(tmp_path: Path) -> None:
    """Of several adapters: requests and answers are more than the socket takes, and the first save fails.

    The writer ends when it is closed; that of the tests' ranks stays for their next actor; see `local_ranks.py`.
    """
    item = WriteItem(MetadataIndex("weight" * 400_000), WriteItemType.BYTE_IO)
    (tmp_path / "full").symlink_to("/dev/full")
    writer = WriterProcess()
    writer._socket.settimeout(60)
    buckets: list[Any] = [
        (tmp_path / name, name, ([(item, io.BytesIO(name.encode() * 4096))], []))
        for name in ("full", "second", "third")
    ]
    answers = [writer.submit([_StorageWriterTransforms()], [bucket]) for bucket in buckets]
    wait(answers, timeout=60)
    assert all(answer.done() for answer in answers)
    with pytest.raises(OSError, match="No space left on device"):
        answers[0].result()
    assert [list(answer.result().files) for answer in answers[1:]] == [["second"], ["third"]]
    writer.close()
    assert writer._process.returncode == -signal.SIGKILL


def test_a_writer_ends_with_its_trainer_though_it_writes(tmp_path: Path) -> None:
    """The next trainer may save into the same folder."""
    os.mkfifo(tmp_path / "held")  # without a reader
    writer = WriterProcess()
    item = WriteItem(MetadataIndex("weight"), WriteItemType.BYTE_IO)
    bucket: Any = (tmp_path / "held", "held", ([(item, io.BytesIO(b"x"))], []))
    answer = writer.submit([_StorageWriterTransforms()], [bucket])
    writer._socket.shutdown(socket.SHUT_RDWR)
    assert writer._process.wait(60) == 0
    with pytest.raises(OSError, match="is gone"):
        answer.result(60)


# --- what rank 0 alone does, without trainers ---
class Files:
    """In place of `PendingFiles`: the shards are there already."""

    files: ClassVar[dict[str, Any]] = {}

    def finish(self) -> None: ...


def finish_twice(actor: Any, folder: str) -> tuple[str, list[str]]:
    """(the error of a save for whose last files rank 0 finds no room, the checkpoint's files when it has)."""
    from fusionrl.trainer import checkpoint

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saving = checkpoint.Saving(f"{folder}/trainer", actor.rank, Files(), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "facts_of", no_room)
        with pytest.raises(OSError, match="trainer rank 0 could not write") as failure:
            saving.finish()
    saving.finish()
    return str(failure.value), sorted(os.listdir(f"{folder}/trainer"))


def test_what_rank_0_cannot_write_is_an_error_on_every_rank(workers: LocalRanks, hf: Any, tmp_path: Path) -> None:
    (tmp_path / "trainer.partial").mkdir()
    (tmp_path / "trainer.partial" / "shard").write_text("weights")
    workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2))
    for said, names in workers.run(finish_twice, str(tmp_path)):
        assert "No space left" in said and "nothing was published" in said
        assert names == ["fusionrl.json", "shard"]


def test_a_rename_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    megatron_patches.install()
    from fusionrl.trainer.checkpoint import _publish

    final = tmp_path / "trainer"
    final.mkdir()
    (final / "shard").write_text("before")
    with pytest.raises(FileNotFoundError):
        _publish(tmp_path / "trainer.partial", final)  # it is not there
    assert (final / "shard").read_text() == "before"
    assert os.listdir(tmp_path) == ["trainer"]


def test_a_disk_that_fails_after_the_rename_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_patches.install()
    from fusionrl.trainer.checkpoint import _publish

    for folder, text in (("trainer", "before"), ("trainer.partial", "after")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shard").write_text(text)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        _publish(tmp_path / "trainer.partial", tmp_path / "trainer")
    assert (tmp_path / "trainer" / "shard").read_text() == "after"


def test_a_full_disk_has_its_own_error_and_not_torch_s(tmp_path: Path) -> None:
    """What is written to /dev/full meets the kernel's full disk; torch says "unexpected pos 704 vs 598" of one."""
    megatron_patches.install()
    from fusionrl.trainer import checkpoint_io

    torch_error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error = checkpoint_io._system_error(torch_error, Path("/dev/full"))
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert checkpoint_io._system_error(torch_error, tmp_path / "room") is torch_error
    file = tmp_path / "__0_0.distcp"
    file.symlink_to("/dev/full")
    item = WriteItem(MetadataIndex("weight"), WriteItemType.BYTE_IO)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint_io.write_buckets([], [(file, file.name, ([(item, io.BytesIO(b"x" * 4096))], []))])
