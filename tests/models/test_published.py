"""Folders of multimodal models as they are published: their text part is read as from a text model's own folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionrl.checks.model import weight_shape_errors
from fusionrl.config.config import Config
from fusionrl.data.tokenizer import read_end_tokens
from fusionrl.models import families
from fusionrl.models.engine_config import engine_fields, text_view
from fusionrl.models.hf_folder import text_config
from fusionrl.models.hf_io import HFReader, read_part
from fusionrl.models.hf_save import save_hf
from fusionrl.models.quantization import read_quantization
from fusionrl.models.shape import read_model_shape, shape_from_hf_config
from tests.tiny_model import make_fp8
from tests.trainer import hf_models

DENSE, MIXED = "qwen3_5_text", "qwen3_5_moe_text"
LAYER = "model.language_model.layers.0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """made(family): a folder with published/ and text/, the same weights in both forms."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            hf_models.make_published(folders[family], family, family == DENSE)
        return folders[family]

    return make


@pytest.mark.parametrize("family", [DENSE, MIXED])
def test_every_part_is_that_of_the_plain_form(made: Callable[[str], Path], family: str) -> None:
    """Bit by bit, at one and two tensor-parallel ranks; the names are the text model's."""
    published, plain = (HFReader(made(family) / form) for form in ("published", "text"))
    shape = read_model_shape(made(family) / "published")
    assert shape == read_model_shape(made(family) / "text")
    stored = set(load_file(made(family) / "published" / "model.safetensors"))
    assert (f"{LAYER}.mlp.experts.gate_up_proj" in stored) == (family == MIXED)
    for rule in families.model_rules(shape).values():
        for size in (1, 2):
            for rank in range(size):
                want = read_part(plain, rule, rank, size)
                assert torch.equal(read_part(published, rule, rank, size), want), rule.megatron


def test_what_an_engine_is_given(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The text model's config.json as transformers writes it, links to the rest; a text model's folder is itself."""
    folder = made(MIXED)
    assert text_view(str(folder / "text"), tmp_path / "none") == str(folder / "text")
    assert text_view("a/name-of-the-hub", tmp_path / "none") == "a/name-of-the-hub"
    for _ in range(2):  # an engine that starts anew
        view = Path(text_view(str(folder / "published"), tmp_path / "view"))
    assert not (tmp_path / "none").exists()
    config, want = (json.loads((path / "config.json").read_text()) for path in (view, folder / "text"))
    assert {name: config[name] for name in ("architectures", "model_type")} == {
        name: want[name] for name in ("architectures", "model_type")
    }
    assert (view / "model.safetensors").resolve() == folder / "published" / "model.safetensors"
    assert read_model_shape(view) == read_model_shape(folder / "text")
    assert engine_fields(view) == engine_fields(folder / "text") == engine_fields(folder / "published") != {}


@pytest.mark.parametrize("form", ["text", "published"])
def test_a_draft_model_does_not_get_the_fields_of_the_model(
    made: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    """SGLang puts what --json-model-override-args brings into both config.json files; a draft rotates whole heads."""
    folder = made(MIXED) / form
    view = text_view(str(folder), tmp_path / "view", is_filled=True)
    assert view == str(tmp_path / "view") and engine_fields(view) == {} != engine_fields(folder)
    config = json.loads(Path(view, "config.json").read_text())
    assert config.items() >= engine_fields(folder).items() and read_model_shape(view) == read_model_shape(folder)


def test_only_another_model_type_is_written_into_config_json(tmp_path: Path) -> None:
    """OLMo 3 has another class alone, by --json-model-override-args: in a file transformers drops its rope_theta."""
    for family in ("olmo3", "glm_moe_dsa"):
        sizes = hf_models.COMMON | (hf_models.FAMILIES | hf_models.SPARSE)[family] | {"model_type": family}
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps(sizes))
        assert "architectures" in engine_fields(tmp_path / family)
    assert text_view(str(tmp_path / "olmo3"), tmp_path / "view") == str(tmp_path / "olmo3")
    view = text_view(str(tmp_path / "glm_moe_dsa"), tmp_path / "view")
    config = json.loads(Path(view, "config.json").read_text())
    assert (config["model_type"], config["index_topk"], engine_fields(view)) == ("deepseek_v3", None, {})


def test_a_folder_without_weights_is_saved_as_a_text_model(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing says then in which form they are wanted: a Megatron checkpoint has them."""
    shutil.copytree(made(MIXED) / "published", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    want = load_file(made(MIXED) / "text" / "model.safetensors")
    save_hf(tmp_path / "out", tmp_path / "source", want.items(), write=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == want.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == MIXED


def edited(folder: Path, copy: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the folder after `change(config, tensors)`."""
    shutil.copytree(folder, copy)
    config, tensors = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
    change(config, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def errors_of(folder: Path) -> list[str]:
    return weight_shape_errors(Config.from_flat({"hf_checkpoint": str(folder)}))


def _set(tensors: dict[str, torch.Tensor], name: str, *sizes: int) -> None:
    tensors[f"{LAYER}.{name}"] = torch.zeros(sizes)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            lambda config, tensors: _set(tensors, "mlp.experts.gate_up_proj", 8, 48, 32),
            "experts.gate_up_proj has shape [8, 48, 32], but config.json describes [4, 48, 32]",
        ),
        (lambda config, tensors: _set(tensors, "mlp.experts.gate_up_proj", 4, 47, 32), "has shape [4, 47, 32], but"),
        (lambda config, tensors: _set(tensors, "mlp.experts.down_proj", 32, 24), "has shape [32, 24], but"),
        (
            lambda config, tensors: tensors.pop(f"{LAYER}.mlp.experts.down_proj"),
            "model.layers.0.mlp.experts.0.down_proj.weight and 3 more are in none of its files",
        ),
        (lambda config, tensors: _set(tensors, "mlp.experts.bias", 4), f"{LAYER}.mlp.experts.bias is no part of"),
        (
            lambda config, tensors: config["text_config"].update(hidden_size=16),
            "embed_tokens.weight has shape [120, 32], but config.json (head_dim 16, hidden_size 16) describes",
        ),
    ],
    ids=["experts", "halves", "dimensions", "missing", "extra", "nested size"],
)
def test_files_that_do_not_fit_are_named(made: Callable[[str], Path], tmp_path: Path, change: Any, part: str) -> None:
    assert errors_of(made(MIXED) / "published") == []
    errors = errors_of(edited(made(MIXED) / "published", tmp_path / "bad", change))
    assert any(part in error for error in errors), errors
    assert all(error.startswith(f"--hf-checkpoint {tmp_path / 'bad'}") for error in errors)


def test_a_part_of_another_shape_is_refused_when_it_is_read(made: Callable[[str], Path], tmp_path: Path) -> None:
    """On a node whose files are others than those that the command has checked."""
    bad = edited(made(MIXED) / "published", tmp_path / "bad", lambda _, x: _set(x, "mlp.experts.down_proj", 4, 32, 20))
    with pytest.raises(ValueError, match=r"experts.down_proj has shape \(4, 32, 20\); by config.json it is \(4, 32, "):
        HFReader(bad).get("model.layers.0.mlp.experts.1.down_proj.weight", (32, 24))


@pytest.mark.parametrize("text", [None, {"model_type": "qwen3"}], ids=str)
def test_a_multimodal_model_without_its_text_part(text: Any) -> None:
    with pytest.raises(ValueError, match="here: model_type 'qwen3_5' needs a text_config whose model_type is 'qwen"):
        shape_from_hf_config({"model_type": "qwen3_5", "text_config": text}, "here")


def test_fields_that_stand_at_the_top(tmp_path: Path) -> None:
    """Embeddings are tied as the whole model says; the end of a text is its part's."""
    raw = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": {"eos_token_id": [7, 9]}}
    assert text_config(raw)["tie_word_embeddings"] is True
    assert text_config(raw | {"tie_word_embeddings": False})["tie_word_embeddings"] is False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_end_tokens(tmp_path) == {7, 9}


def test_published_in_fp8(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Such folders keep each expert by itself; scales and modules have the long names, too."""
    whole = make_fp8(made(MIXED) / "text", tmp_path / "fp8", (16, 8), left_out=("model.layers.1.mlp",))
    file = tmp_path / "fp8" / "model.safetensors"
    longer = {name.replace("model.", "model.language_model.", 1): x for name, x in load_file(file).items()}
    save_file(longer, file, metadata={"format": "pt"})
    flat = json.loads((tmp_path / "fp8" / "config.json").read_text())
    quantization = flat.pop("quantization_config")
    modules = "modules_to_not_convert"
    quantization[modules] = [name.replace("model.", "model.language_model.", 1) for name in quantization[modules]]
    both = {"text_config": flat | {"quantization_config": quantization}, "quantization_config": quantization}
    config = {"model_type": "qwen3_5_moe"} | both
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    spec, reader = read_quantization(tmp_path / "fp8"), HFReader(tmp_path / "fp8")
    assert spec is not None and spec.names < whole.keys()
    assert errors_of(tmp_path / "fp8") == []
    for name, tensor in whole.items():
        assert torch.equal(reader.get(name, tensor.shape), tensor), name
    save_hf(tmp_path / "whole", tmp_path / "fp8", whole.items(), write=True)
    assert "quantization_config" not in (tmp_path / "whole" / "config.json").read_text()
