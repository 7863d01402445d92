"""`.metadata` of torch's own checkpoints is read, whichever way the folder was given, and nothing beside it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from fusionrl.trainer.safe_load import read_metadata


@pytest.mark.parametrize("kind", [str, Path])
def test_what_torch_writes_is_read(kind: type[str] | type[Path], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    torch.distributed.checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=kind(folder), no_dist=True)
    with (folder / ".metadata").open("rb") as file:
        metadata = read_metadata(file)
    assert list(metadata.state_dict_metadata) == ["weight"]
    assert metadata.storage_meta is not None and str(metadata.storage_meta.checkpoint_id) == str(folder)


def test_a_path_of_python_3_13_is_read(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    text = pickle.dumps(metadata, protocol=2)
    assert b"cpathlib\n" in text
    assert read_metadata(io.BytesIO(text.replace(b"cpathlib\n", b"cpathlib._local\n"))) == metadata


def test_other_names_of_pathlib_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib\.os"):
        read_metadata(io.BytesIO(b"cpathlib\nos\n."))
