"""Hugging Face folders: reading tensors by name, writing one or several files."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from fusionrl.models.hf_folder import INDEX
from fusionrl.models.hf_io import HFReader
from fusionrl.models.hf_save import save_hf


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"old": torch.zeros(1)}, folder / "model.safetensors")
    return folder


TENSORS = [(f"t{i}", torch.randn(4, 8, generator=torch.Generator().manual_seed(i))) for i in range(5)]


@pytest.mark.parametrize(("limit", "files"), [(10**9, 1), (2 * 128, 3), (1, 5)])
def test_written_and_read_back(source, tmp_path, limit, files):
    out = tmp_path / "out"
    save_hf(out, source, iter(TENSORS), write=True, max_file_bytes=limit)
    assert len(list(out.glob("*.safetensors"))) == files
    assert (out / INDEX).exists() == (files > 1)
    reader = HFReader(out)
    assert reader.names == {name for name, _ in TENSORS}
    for name, tensor in TENSORS:
        assert torch.equal(reader.get(name, (4, 8)), tensor)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama", "torch_dtype": "float32"}
    assert (out / "tokenizer.json").exists()
    if files > 1:
        assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == 5 * 128


def test_tensors_that_nobody_trains_come_from_the_source_where_it_has_files(source, tmp_path):
    """The source of a Megatron checkpoint may be a config.json and a tokenizer."""
    save_hf(tmp_path / "all", source, iter(TENSORS), write=True, kept=re.compile("old"))
    assert HFReader(tmp_path / "all").names == {"old", *(name for name, _ in TENSORS)}
    (source / "model.safetensors").unlink()
    save_hf(tmp_path / "trained", source, iter(TENSORS), write=True, kept=re.compile("old"))
    assert HFReader(tmp_path / "trained").names == {name for name, _ in TENSORS}


def test_a_write_that_fails_leaves_no_folder_of_that_name(source, tmp_path):
    def broken():
        yield TENSORS[0]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        save_hf(tmp_path / "out", source, broken(), write=True)
    assert not (tmp_path / "out").exists()
    save_hf(tmp_path / "out", source, iter(TENSORS), write=True)
    assert HFReader(tmp_path / "out").names == {name for name, _ in TENSORS}


def test_ranks_that_do_not_write_take_part_in_the_export(source, tmp_path):
    tensors = iter(TENSORS)
    save_hf(tmp_path / "out", source, tensors, write=False)
    assert next(tensors, None) is None
    assert not (tmp_path / "out").exists()


def split_folder(source, tmp_path):
    out = tmp_path / "split"
    save_hf(out, source, iter(TENSORS), write=True, max_file_bytes=2 * 128)
    return out


def test_files_that_do_not_fit_the_index(source, tmp_path):
    folder = split_folder(source, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["t9"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"split: tensor t9 is in none of its files"):
        HFReader(folder).get("t9", (4, 8))
    for text in ("{", "{}", "[]"):
        (folder / INDEX).write_text(text)
        with pytest.raises(ValueError, match=f"{INDEX} is malformed"):
            HFReader(folder)


def test_a_node_needs_only_the_files_that_it_reads(source, tmp_path):
    """Those of its pipeline stage: another's may be missing there."""
    folder = split_folder(source, tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"cut off")
    reader = HFReader(folder, "--ref-load")
    assert torch.equal(reader.get("t1", (4, 8)), TENSORS[1][1])
    with pytest.raises(ValueError, match=r"--ref-load .*model-00002-of-00003.* t2 cannot be read .*No such file"):
        reader.get("t2", (4, 8))
    with pytest.raises(ValueError, match="--ref-load .*model-00003-of-00003.*cut off"):
        reader.get("t4", (4, 8))


def test_files_of_other_names_without_an_index_are_refused(source):
    (source / "model.safetensors").rename(source / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"--ref-load .* it has neither model.safetensors nor .*save_pretrained"):
        HFReader(source, "--ref-load")
