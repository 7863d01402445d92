"""Folders that appear complete: what the disk holds, and what a power cut would leave."""

import errno
import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fusionrl.base.files import flush, flush_open, publish_folder
from fusionrl.buffer.reject_sampling import AcceptedSamples
from fusionrl.cpu import megatron_patches
from fusionrl.data.sample import Sample, Status
from fusionrl.models.hf_save import save_hf
from fusionrl.runtime.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]


class Disk:
    """Notes what is flushed, in place of a power cut that shows what was not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, rename = os.fsync, os.rename

        def noted_fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.access.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
            if error := self.fails(path):
                raise OSError(error, os.strerror(error))
            fsync(descriptor)
            self.events.append(("flushed", path))

        def noted_rename(old: Path, new: Path) -> None:
            rename(old, new)
            self.events.append((str(old), str(new)))

        self.fails: Callable[[str], int] = lambda path: 0
        """The error of a flush; 0: none."""
        self.access: list[int] = []
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted_rename)

    def lost_at_a_power_cut(self, final: Path) -> list[str]:
        """What could be missing below `final` though its name is there; or the name itself, renamed and not flushed."""
        moment, written = next((i, old) for i, (old, new) in enumerate(self.events) if new == str(final))
        held = {path for event, path in self.events[:moment] if event == "flushed"}
        paths = (final, *final.rglob("*"))
        lost = [str(path) for path in paths if f"{written}{str(path)[len(str(final)) :]}" not in held]
        return lost if ("flushed", str(final.parent)) in self.events[moment:] else [*lost, "the name"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    first_part = ("flushed", str(tmp_path / "out.partial" / "part-0.safetensors"))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(4)
        assert first_part in disk.events  # other ranks wait for one part at a time, and not for all of them at the end

    save_hf(tmp_path / "out", source, tensors(), write=True, max_file_bytes=16)
    assert sum(path.suffix == ".safetensors" for path in (tmp_path / "out").iterdir()) == 2
    assert disk.lost_at_a_power_cut(tmp_path / "out") == []


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for attempt in ("first", "second"):  # the same step, saved again
        folder = checkpoints.begin(0)
        (folder / "custom").mkdir()
        (folder / "custom" / "state").write_text(attempt)
        (folder / "buffer.json").write_text("{}")
        assert disk.lost_at_a_power_cut(checkpoints.publish(0, folder, {}).path) == []
        disk.events.clear()


def test_the_disk_fails_before_the_older_folder_goes(tmp_path: Path, disk: Disk) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    (checkpoints.begin(0) / "buffer.json").write_text("{}")
    first = checkpoints.publish(0, checkpoints.folder / ".writing_step_000001", {})
    disk.fails = lambda path: errno.EIO if path.endswith("buffer.json") else 0
    folder = checkpoints.begin(0)
    (folder / "buffer.json").write_text("{}")
    with pytest.raises(OSError, match="Input/output error"), checkpoints.discarding(folder):
        checkpoints.publish(0, folder, {})
    assert checkpoints.latest() == first


def test_trainers_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, disk: Disk) -> None:
    megatron_patches.install()
    from fusionrl.trainer.checkpoint import Saving
    from fusionrl.trainer.checkpoint_io import write_buckets

    partial = tmp_path / "trainer.partial"
    partial.mkdir()
    for name in ("common.pt", ".metadata"):
        (partial / name).write_text(name)
    item = WriteItem(MetadataIndex("weight"), WriteItemType.BYTE_IO)
    written = write_buckets(
        [_StorageWriterTransforms()], [(partial / "shard", "shard", ([(item, io.BytesIO(b"x"))], []))]
    )
    files: Any = SimpleNamespace(files=written.files, finish=lambda: None)
    Saving(str(tmp_path / "trainer"), 0, files, {})._publish()
    assert len(list((tmp_path / "trainer").iterdir())) == 4
    assert disk.lost_at_a_power_cut(tmp_path / "trainer") == []


def test_accepted_answers_are_on_the_disk_before_a_checkpoint_counts_them(tmp_path: Path, disk: Disk) -> None:
    accepted = AcceptedSamples(tmp_path / "out.jsonl", threshold=0.5, per_prompt=1)
    sample = Sample(index=0, group_index=0, prompt="p", response="good", status=Status.COMPLETED)
    sample.tokens, sample.response_length = [1, 2], 1
    assert accepted.add(0, [sample], [1.0])["accepted"] == 1
    assert ("flushed", str(accepted.path)) in disk.events


@pytest.mark.parametrize("name", ["weights", "inner", "partial"])
def test_a_disk_that_fails_gives_no_folder(name: str, tmp_path: Path, disk: Disk) -> None:
    disk.fails = lambda path: errno.EIO if path.endswith(name) else 0
    (tmp_path / "partial" / "inner").mkdir(parents=True)
    (tmp_path / "partial" / "weights").write_text("w")
    with pytest.raises(OSError, match="Input/output error"):
        publish_folder(tmp_path / "partial", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


def test_a_file_system_that_flushes_no_folders_is_enough(tmp_path: Path, disk: Disk) -> None:
    disk.fails = lambda path: errno.EINVAL if os.path.isdir(path) else 0
    (tmp_path / "partial" / "inner").mkdir(parents=True)
    (tmp_path / "partial" / "inner" / "weights").write_text("w")
    (tmp_path / "partial" / "link").symlink_to(tmp_path / "nowhere")
    publish_folder(tmp_path / "partial", tmp_path / "final")
    assert (tmp_path / "final" / "inner" / "weights").read_text() == "w"


def test_files_are_open_for_writing_when_they_are_flushed(tmp_path: Path, disk: Disk) -> None:
    """Linux refused, or left out, the flush of a file on SMB that is open for reading alone."""
    (tmp_path / "weights").write_text("w")
    flush([tmp_path / "weights"])
    assert disk.access == [os.O_RDWR]


def test_a_parent_that_may_not_be_read_is_enough(tmp_path: Path, disk: Disk) -> None:
    """A drop folder: --save-hf may write into it."""
    tmp_path.chmod(0o755)
    (tmp_path / "drop" / "partial").mkdir(parents=True)
    (tmp_path / "drop").chmod(0o333)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    program = "import os, sys; from pathlib import Path; from fusionrl.base.files import rename_flushed; "
    program += "os.setuid(65534) if os.getuid() == 0 else None; rename_flushed(*map(Path, sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", program, "drop/partial", "drop/final"], cwd=tmp_path, env=env, check=True)
    (tmp_path / "drop").chmod(0o755)
    assert os.listdir(tmp_path / "drop") == ["final"]


def test_accepted_answers_may_go_to_a_device(disk: Disk) -> None:
    with open("/dev/null", "ab") as out:
        flush_open(out.fileno())
    assert len(disk.access) == 1
