"""What rank 0 alone does to a checkpoint, without trainers."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fusionrl.cpu import megatron_patches
from tests.trainer.forked_program import ForkedProgram

COUNTERS = {"rollout_id": 1, "optimizer_steps": 2, "skipped": 0}


def _module() -> Any:
    """fusionrl.trainer.checkpoint, which imports Megatron: not when tests are collected, and after the shims."""
    megatron_patches.install()
    from fusionrl.trainer import checkpoint

    return checkpoint


@pytest.mark.parametrize(
    ("description", "refusal"),
    [
        ({"format": 2, "files": {}}, None),
        ({"format": 1}, None),
        ({"format": 1, "files": {}}, "has hashes, and the format that had none"),
        ({"format": 3}, "this version reads 1 and 2"),
        ({}, "format None"),
    ],
)
def test_which_formats_are_read(description: dict[str, object], refusal: str | None, tmp_path: Path) -> None:
    (tmp_path / "fusionrl.json").write_text(json.dumps({"counters": COUNTERS, **description}))
    if refusal is None:
        assert _module().read_description(str(tmp_path))["counters"] == COUNTERS
        return
    with pytest.raises(ValueError, match=refusal):
        _module().read_description(str(tmp_path))


# Two ranks finish a checkpoint whose files are there; rank 0 finds no room for what it writes alone.
TWO_RANKS = """
import datetime, errno, sys
from pathlib import Path
import torch.distributed as dist
from fusionrl.trainer import checkpoint

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
)

class Files:
    files = {}
    def finish(self):
        pass

def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

saving = checkpoint.Saving(folder + "/trainer", rank, Files(), {})
facts_of = checkpoint.facts_of
checkpoint.facts_of = no_room
try:
    saving.finish()
except OSError as error:
    print(error)
checkpoint.facts_of = facts_of
saving.finish()
print(sorted(path.name for path in Path(folder, "trainer").iterdir()))
dist.destroy_process_group()  # or gloo's threads, still alive at the exit, abort the process now and then
"""


def test_what_rank_0_cannot_write_is_an_error_on_every_rank(forkserver: None, tmp_path: Path) -> None:
    (tmp_path / "trainer.partial").mkdir()
    (tmp_path / "trainer.partial" / "shard").write_text("weights")
    ranks = [ForkedProgram(["-c", TWO_RANKS, str(rank), str(tmp_path)], tmp_path) for rank in range(2)]
    try:
        for program in ranks:
            done = program.wait(150)
            assert done.returncode == 0, done.stderr[-2000:]
            said, names = done.stdout.splitlines()
            assert "trainer rank 0 could not write" in said and "No space left" in said and "nothing was" in said
            assert names == "['fusionrl.json', 'shard']"
    finally:
        for program in ranks:
            program.process.kill()


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
