"""Models that see: positions and counts against transformers; shapes, spellings and orientations of folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fusionrl.models import families
from fusionrl.models.engine_config import pushed_arguments, text_view
from fusionrl.models.families.vision import DeepstackTower
from fusionrl.models.hf_folder import whole_name
from fusionrl.models.hf_io import HFReader, read_part
from fusionrl.models.hf_save import as_stored
from fusionrl.models.quantization import shape_errors
from fusionrl.models.shape import ModelShape, differences, read_model_shape, shape_from_hf_config
from fusionrl.models.vision import axes, positions
from tests.tiny_vision import IMAGE, KIMI, KINDS, config_of, make_tiny_vlm, random_image, turn_experts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            make_tiny_vlm(folders[kind], kind)
        return folders[kind]

    return make


def test_positions_are_those_of_transformers() -> None:
    """Texts and images at random, an image at the very start and at the end, one that is cut off."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config_of("qwen3_vl")).model
    random = np.random.default_rng(3)
    for case in range(12):
        tokens: list[int] = [] if case % 3 == 0 else [7] * int(random.integers(1, 6))
        spans, grids = [], []
        for _ in range(random.integers(1, 4)):
            merged = (1, int(random.integers(1, 6)), int(random.integers(1, 6)))
            spans.append((len(tokens), merged))
            grids.append((1, merged[1] * 2, merged[2] * 2))
            tokens += [IMAGE] * (merged[1] * merged[2]) + [7] * int(random.integers(1, 5))
        tokens = tokens[: None if case % 2 else -1]
        row = torch.tensor(tokens)[None]
        want, _ = model.get_rope_index(row, (row == IMAGE).int(), image_grid_thw=torch.tensor(grids))
        assert np.array_equal(positions(len(tokens), spans), want[:, 0].numpy())
    assert np.array_equal(positions(5, [(2, (1, 2, 4))]), positions(10, [(2, (1, 2, 4))])[:, :5])
    assert positions(0, []).shape == (3, 0)


def test_axes_are_those_of_transformers() -> None:
    assert axes((2, 3, 3), False, 8).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    for section in ((24, 20, 20), (4, 2, 2), (11, 11, 10)):
        num_lanes = sum(section)
        of_axis = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, num_lanes).clone()
        twice = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(SimpleNamespace(mrope_section=section), of_axis)
        assert axes(section, True, num_lanes).tolist() == twice.flatten().tolist()[:num_lanes]


@pytest.mark.parametrize("kind", [*KINDS, KIMI])
def test_names_and_shapes_are_those_of_a_checkpoint(made: Callable[[str], Path], kind: str) -> None:
    folder = made(kind)
    shape, blind = read_model_shape(folder, sees=True), read_model_shape(folder)
    assert shape.vision is not None and blind.vision is None
    assert shape.vision.image_token == IMAGE
    assert [name for name, *_ in differences(shape, blind)] == ["vision"]
    assert ModelShape(**json.loads(json.dumps(shape.model_dump()))) == shape
    assert shape_errors(folder, shape, is_loaded=True) == shape_errors(folder, blind, is_loaded=True) == []
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith("bias") or ".gate." not in name]  # noqa: SIM118
        count = sum(file.get_tensor(name).numel() for name in names)  # without buffers, which balance experts
    assert shape.num_parameters == count
    assert 0 < blind.num_parameters < count
    assert shape.num_active_parameters == blind.num_active_parameters
    image = random_image(0, 6, 4, patch=shape.vision.patch_size)
    assert shape.vision.num_image_tokens(*image.shape[:2]) == 6
    assert shape.vision.grid(*image.shape[:2]) == (1, 4, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_text_part_is_that_of_another_family(made: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """And an engine of a run without images serves the folder as it is."""
    text = json.loads((made(kind) / "config.json").read_text())["text_config"]
    plain = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}[kind]
    wanted = shape_from_hf_config(text | {"model_type": plain, "rope_scaling": None})
    assert read_model_shape(made(kind)) == wanted.model_copy(update={"model_type": f"{kind}_text"})
    assert text_view(str(made(kind)), tmp_path) == str(made(kind))


def test_text_part_of_kimi_vl_is_deepseek_v3(made: Callable[[str], Path], tmp_path: Path) -> None:
    """As which an engine of a run without images serves it; and its tensors have the names of the files again."""
    folder = made(KIMI)
    shape, text = read_model_shape(folder, sees=True), json.loads((folder / "config.json").read_text())["text_config"]
    assert read_model_shape(folder) == shape_from_hf_config(text | {"tie_word_embeddings": False})
    served = json.loads((Path(text_view(str(folder), tmp_path)) / "config.json").read_text())
    assert (served["model_type"], served["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    form = families.get_family("deepseek_v3").published
    assert form is not None
    stored = set(load_file(folder / "model.safetensors"))
    assert {whole_name(name, form) for name in families.hf_shapes(shape)} == stored
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"merge_kernel_size \[2, 1\] of the vision_config is not a square"):
        shape_from_hf_config(raw | {"vision_config": raw["vision_config"] | {"merge_kernel_size": [2, 1]}}, sees=True)


def respelled(folder: Path, copy: Path, spell: Callable[[str], str]) -> Path:
    """A copy of the folder whose tensors have other names."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file({spell(name): x for name, x in tensors.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def short(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def long(name: str) -> str:
    text = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return f"model.{text}" if text.startswith("visual.") else text


@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_are_read_and_written(made: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """Those of transformers 4 and of 5, for each family; what is written has the names of the folder."""
    folder, shape = made(kind), read_model_shape(made(kind), sees=True)
    other = respelled(folder, tmp_path / "other", lambda name: long(name) if short(name) == name else short(name))
    readers = [HFReader(folder), HFReader(other)]
    assert readers[0].names == readers[1].names == set(families.hf_shapes(shape))
    assert shape_errors(other, shape, is_loaded=True) == []
    for name, sizes in families.hf_shapes(shape).items():
        assert torch.equal(readers[0].get(name, sizes), readers[1].get(name, sizes))
    for path, reader in zip((folder, other), readers, strict=True):
        tensors = ((name, reader.get(name, sizes)) for name, sizes in families.hf_shapes(shape).items())
        back, want = dict(as_stored(tensors, reader)), load_file(path / "model.safetensors")
        assert back.keys() == want.keys()
        assert all(torch.equal(tensor, want[name]) for name, tensor in back.items())


def test_both_orientations_of_experts(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Published folders have inputs before outputs, those of transformers 5 the reverse; square ones are refused."""
    shape, folder = read_model_shape(made("qwen3_vl_moe"), sees=True), made("qwen3_vl_moe")
    shutil.copytree(folder, tmp_path / "turned")
    turn_experts(tmp_path / "turned")
    readers = [HFReader(path) for path in (folder, tmp_path / "turned")]
    first = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert [reader.place(first, (96, 64)).is_turned for reader in readers] == [True, False]
    for rule in families.model_rules(shape).values():
        for size in (1, 2):
            for rank in range(size):
                assert torch.equal(*(read_part(reader, rule, rank, size) for reader in readers)), rule.megatron
    tensors = [(name, readers[1].get(name, sizes)) for name, sizes in families.hf_shapes(shape).items()]
    want = load_file(folder / "model.safetensors")
    assert all(torch.equal(x, want[name]) for name, x in as_stored(tensors, readers[0]))
    assert shape_errors(tmp_path / "turned", shape, is_loaded=True) == []
    assert pushed_arguments(folder, None) == {}
    assert pushed_arguments(tmp_path / "turned", None) == {"load_format": "dummy"}  # SGLang could not read it


def test_square_experts_are_refused(tmp_path: Path) -> None:
    make_tiny_vlm(tmp_path, "qwen3_vl_moe", hidden=96)
    with pytest.raises(ValueError, match="is square for each expert: it does not say which"):
        shape_errors(tmp_path, read_model_shape(tmp_path, sees=True))


def test_older_folders_have_the_text_part_at_the_top(made: Callable[[str], Path]) -> None:
    """Qwen2.5-VL as it was published first."""
    raw = json.loads((made("qwen2_5_vl") / "config.json").read_text())
    text = dict(raw["text_config"])
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    flat = {name: value for name, value in raw.items() if name != "text_config"}
    flat = text | flat
    assert shape_from_hf_config(flat, sees=True) == read_model_shape(made("qwen2_5_vl"), sees=True)


def test_what_does_not_fit_is_refused(made: Callable[[str], Path]) -> None:
    raw = json.loads((made("qwen3_vl") / "config.json").read_text())
    assert isinstance(shape_from_hf_config(raw, sees=True).vision, DeepstackTower)

    def refused(part: str, change: dict[str, object]) -> str:
        with pytest.raises(ValueError, match="^here: ") as error:
            shape_from_hf_config(raw | {part: raw[part] | change}, "here", sees=True)
        return str(error.value)

    assert "out_hidden_size 32 of the tower, hidden_size 64" in refused("vision_config", {"out_hidden_size": 32})
    assert "3 deepstack_visual_indexes" in refused("vision_config", {"deepstack_visual_indexes": [0, 1, 2]})
    assert "hidden_act 'relu' of the vision_config" in refused("vision_config", {"hidden_act": "relu"})
    rope = {"rope_type": "yarn", "factor": 4.0, "mrope_section": [4, 2, 2]}
    assert "'yarn' is not supported" in refused("text_config", {"rope_parameters": rope})
    rope = {"mrope_section": [8, 8, 8], "mrope_interleaved": True}
    assert "[8, 8, 8] for 8 pairs" in refused("text_config", {"rope_parameters": rope})
    rope = {"mrope_section": [4, 2, 2]}
    for one in (rope, rope | {"mrope_interleaved": False}):
        assert "mrope_interleaved must be true" in refused("text_config", {"rope_parameters": one})
    with pytest.raises(ValueError, match="here: a qwen3 model sees no images; models that do are kimi_vl, .*qwen3_vl"):
        shape_from_hf_config(raw["text_config"] | {"model_type": "qwen3"}, "here", sees=True)
