"""What is wrong with images before a run starts: flags, the model's files, and prompts that are too long by them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fusionrl.checks.doctor.examine import probe_rows
from fusionrl.checks.doctor.probes import image_findings
from fusionrl.checks.images import engine_image_errors, image_errors
from fusionrl.checks.lengths import file_length_errors, length_errors
from fusionrl.config.config import Config
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.models.shape import read_model_shape, shape_from_hf_config
from tests.tiny_vision import CHAT_TEMPLATE, config_of, make_processor, raw_config

KEYS = {"image": "images"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that sees, without its weights."""
    folder = tmp_path / "model"
    make_processor(folder, "qwen2_5_vl")
    config_of("qwen2_5_vl").save_pretrained(folder)
    return folder


def errors_of(model: Path, **flags: Any) -> list[str]:
    values = {"hf_checkpoint": str(model), "multimodal_keys": KEYS, "apply_chat_template": True} | flags
    return image_errors(Config.from_flat(values), read_model_shape(model, sees=True))


def _edit(file: str, **values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | values))

    return edit


def _template(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        assert old in CHAT_TEMPLATE
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(old, new))

    return edit


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no processor": (lambda folder: (folder / "preprocessor_config.json").unlink(), "has no preprocessor_config.json"),
    "strange limits": (_edit("preprocessor_config.json", max_pixels="many"), "'many' is not a number of pixels"),
    "other patches": (
        _edit("preprocessor_config.json", patch_size=16),
        "its image processor has 16 pixels of a patch, its model 14; take the files of one model",
    ),
    "an image twice": (
        _template("<|image_pad|>", "<|image_pad|>" * 2),
        "writes 2 <|image_pad|> for an image; take the",
    ),
    "no image": (_template("<|image_pad|>", ""), "writes 0 <|image_pad|> for an image"),
    "text alone": (
        _template("{% if m['content'] is string %}", "{{ m['content'] + '' }}{% if true %}"),
        "refuses an image",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit(name: str, model: Path) -> None:
    """Acceptance point A19: one line each."""
    edit, wanted = BROKEN[name]
    edit(model)
    (error,) = errors_of(model)
    assert error.startswith("--multimodal-keys: ") and wanted in error


def test_flags_and_evaluation_sets(model: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert errors_of(model) == []
    text = Config.from_flat({"hf_checkpoint": str(tiny_model), "multimodal_keys": KEYS})
    (error,) = image_errors(text, None)
    assert "has no preprocessor_config.json, which says what images its model takes" in error
    assert errors_of(model, multimodal_folder=str(tmp_path / "gone"))[0].startswith("--multimodal-folder ")
    assert "over --image-max-pixels 900" in errors_of(model, image_min_pixels=1000, image_max_pixels=900)[0]
    sets = [
        {"name": "a", "path": "a.jsonl", "multimodal_keys": {"audio": "a"}},
        {"name": "b", "path": "b.jsonl", "image_max_pixels": 10},
    ]
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps({"eval": {"datasets": sets}}))
    errors = errors_of(model, eval_config=str(path), rollout_max_response_len=4)
    assert len(errors) == 2 and "set a: multimodal_keys: audio: only images are trained on" in errors[0]
    assert "set b: image_max_pixels 10: a token of this model's images has 28 x 28 = 784 pixels" in errors[1]
    sets = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]  # as the flags say
    path = tmp_path / "as-flags.yaml"
    path.write_text(json.dumps({"eval": {"datasets": sets}}))
    for keys, wanted in (
        ({"video": "v"}, "video: only images are trained on"),
        ({"image": ""}, "'' is not the name of"),
    ):
        (error,) = errors_of(model, eval_config=str(path), rollout_max_response_len=4, multimodal_keys=keys)
        assert error.startswith(f"--multimodal-keys: {wanted}")


def test_engines_of_others_serve_no_kimi_vl(model: Path) -> None:
    shape = shape_from_hf_config(raw_config("kimi_vl"), sees=True)
    values: dict[str, Any] = {"hf_checkpoint": str(model), "multimodal_keys": KEYS}
    assert engine_image_errors(Config.from_flat(values), shape) == []
    values["rollout_external_engine_addrs"] = ["localhost:3000"]
    assert engine_image_errors(Config.from_flat(values), read_model_shape(model, sees=True)) == []
    (error,) = engine_image_errors(Config.from_flat(values), shape)
    assert "SGLang computes kimi_vl otherwise than its checkpoint" in error


def test_prompts_that_are_too_long_by_their_images(model: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(np.zeros((224, 224, 3), np.uint8)).save(content, "PNG")
    (tmp_path / "a.png").write_bytes(content.getvalue())
    row = {"input": "<image>" * 30 + "?", "images": ["a.png"] * 30}
    (tmp_path / "data.jsonl").write_text(json.dumps({"input": "short"}) + "\n" + json.dumps(row) + "\n")
    values: dict[str, Any] = {"hf_checkpoint": str(model), "multimodal_keys": KEYS, "apply_chat_template": True}
    values |= {"prompt_data": str(tmp_path / "data.jsonl"), "rollout_max_response_len": 200, "mode": "reject-sampling"}
    config, shape = Config.from_flat(values), read_model_shape(model, sees=True)
    (error,) = length_errors(config, shape)
    assert "line 2" in error and "2000" in error  # 30 images of 64 tokens, their marks, and the text
    (error,) = file_length_errors(config, shape, str(tmp_path / "data.jsonl"))
    assert "line 2" in error
    assert length_errors(Config.from_flat(values | {"image_max_pixels": 784}), shape) == []


def test_doctor_says_what_an_image_costs(model: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(content, "PNG")
    (tmp_path / "a.png").write_bytes(content.getvalue())
    (tmp_path / "data.jsonl").write_text(json.dumps({"input": "<image>?", "images": "a.png", "label": "x"}) + "\n")
    values: dict[str, Any] = {"hf_checkpoint": str(model), "multimodal_keys": KEYS, "apply_chat_template": True}
    config = Config.from_flat(values | {"prompt_data": str(tmp_path / "data.jsonl"), "label_key": "label"})
    tokenizer = load_tokenizer(str(model))
    (finding,) = image_findings(config, tokenizer)
    assert finding.fact == "784 to 50,176 pixels, up to 64 tokens <|image_pad|> of 28 x 28 pixels each"
    (sample,) = probe_rows(config, tokenizer)
    assert isinstance(sample.prompt, str) and "<|vision_start|><|image_pad|><|vision_end|>?" in sample.prompt
    assert image_findings(Config.from_flat({"hf_checkpoint": str(model)}), tokenizer) == []
