"""What rank 0 alone does to a checkpoint, without trainers."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from tests.trainer.trainer_worker import LocalRanks, config_of


def _module() -> Any:
    """fusionrl.trainer.checkpoint, which imports Megatron: not when tests are collected, and after the shims."""
    megatron_patches.install()
    from fusionrl.trainer import checkpoint

    return checkpoint


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
    final, partial = tmp_path / "trainer", tmp_path / "trainer.partial"
    final.mkdir()
    (final / "shard").write_text("before")
    with pytest.raises(FileNotFoundError):
        _module()._publish(partial, final)  # it is not there
    assert (final / "shard").read_text() == "before"
    assert os.listdir(tmp_path) == ["trainer"]


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
