"""Rows with images: read from every kind of file, and what is wrong with them said in a line each."""

from __future__ import annotations

import base64
import copy
import dataclasses
import io
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from fusionrl.checks.data import DataCheck
from fusionrl.cli import data as data_command
from fusionrl.data.columns import ImageColumn, PromptColumns
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import collapsed, normal_form
from fusionrl.data.processor import as_ref
from fusionrl.data.prompts import load_conversations, load_prompts
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import add_images, adopt_images, images_of, prompt_of
from fusionrl.data.sample_json import images_in, pack_sample, unpack_sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.generate import clear_response, prompt_tokens
from fusionrl.rollout.sft_rollout import to_sft_sample
from tests.tiny_vision import CHAT_TEMPLATE, IMAGE, VIDEO, make_processor

Row = dict[str, Any]


def png(seed: int, height: int = 56, width: int = 84) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template and processor's settings of a model that sees: without its weights."""
    folder = tmp_path_factory.mktemp("model")
    make_processor(folder, "qwen2_5_vl")
    (folder / "config.json").write_text(json.dumps({"image_token_id": IMAGE, "video_token_id": VIDEO}))
    return folder


@pytest.fixture
def columns(model: Path) -> PromptColumns:
    column = ImageColumn("images", str(model))
    return PromptColumns("problem", "answer", apply_chat_template=True, images=column, checkpoint=str(model))


def write_lines(folder: Path, *rows: Row) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _no_images_later() -> Iterator[None]:
    yield
    IMAGES.__init__()  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ what is read
def _parquet(folder: Path, rows: list[Row]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    return folder / "data.parquet"


def _arrow(folder: Path, rows: list[Row]) -> Path:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(folder / "data-0.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    return folder


def _json_lines(folder: Path, rows: list[Row]) -> Path:
    images = [[uri(image["bytes"]) for image in row["images"] or ()] for row in rows]
    return write_lines(folder, *(row | {"images": each} for row, each in zip(rows, images, strict=True)))


@pytest.mark.parametrize("write", [_parquet, _arrow, _json_lines])
def test_a_set_of_geometry_from_each_kind_of_file(
    write: Callable[[Path, list[Row]], Path], columns: PromptColumns, model: Path, tmp_path: Path
) -> None:
    """As geometry3k is published; text alone stands between."""
    kinds = [[png(0)], [png(1), png(2, 28, 28)], None]
    rows: list[Row] = [
        {"problem": "Find x. " + "<image>" * len(kind or ()), "answer": "2", "images": kind} for kind in kinds
    ]
    for row in rows:
        row["images"] = row["images"] and [{"bytes": content, "path": None} for content in row["images"]]
    samples = load_prompts(write(tmp_path, rows * 20), load_tokenizer(str(model)), columns).samples
    assert len(samples) == 60
    for sample, kind in zip(samples, kinds * 20, strict=True):
        assert sample.prompt == samples[kinds.index(kind)].prompt and isinstance(sample.prompt, str)
        assert sample.prompt.count("<|vision_start|><|image_pad|><|vision_end|>") == len(kind or ())
        ids = load_tokenizer(str(model)).encode(sample.prompt, add_special_tokens=False)
        assert sample.prompt_tokens is not None
        assert collapsed(sample.prompt_tokens, sample.image_spans).tolist() == ids
        assert [image.num_tokens for _, image in sample.image_spans] == [6, 1][: len(kind or ())]
        sample.tokens = sample.prompt_tokens
        sample.validate()
        for (_, image), content in zip(sample.image_spans, kind or (), strict=True):
            assert np.array_equal(IMAGES.pixels(image), normal_form(content, columns.images.processor.limits))  # type: ignore[union-attr]


def test_values_parts_and_folders(columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.png").write_bytes(png(3))
    parts = [
        {"type": "image"},
        {"type": "text", "text": "and <image>, "},
        {"type": "image_url", "image_url": {"url": uri(png(1))}},
        {"type": "image", "image": "sub/a b.png"},
        {"type": "image", "path": "sub/a b.png"},
        {"type": "image", "url": uri(png(1))},
        {"type": "input_image", "image_url": uri(png(1))},
        {"type": "image"},
    ]
    values = ["sub/a b.png", {"bytes": None, "path": "sub/a b.png"}, f"file://{tmp_path}/sub/a%20b.png"]
    path = write_lines(
        tmp_path,
        {"problem": [{"role": "user", "content": parts}], "answer": "x", "images": values, "metadata": {"i": 1}},
    )
    (sample,) = load_prompts(path, load_tokenizer(str(model)), columns).samples
    assert isinstance(sample.prompt, str) and sample.prompt.count("<|image_pad|>") == 8
    (first, *_), refs = sample.image_spans, [image for _, image in sample.image_spans]
    assert first[1].source == str((tmp_path / "sub" / "a b.png").resolve())
    a, b = refs[0], refs[2]
    assert refs == [a, a, b, a, a, b, b, a] and a != b
    assert sample.messages is not None
    assert [part["type"] for part in sample.messages[0]["content"]] == [
        *("image", "text", "image", "text"),
        *["image"] * 6,
    ]
    elsewhere = PromptColumns(
        "problem", "answer", apply_chat_template=True, images=ImageColumn("images", str(model), str(tmp_path / "sub"))
    )
    (tmp_path / "far").mkdir()
    path = write_lines(tmp_path / "far", {"problem": "<image>", "answer": "x", "images": "a b.png"})
    assert len(load_prompts(path, load_tokenizer(str(model)), elsewhere).samples[0].image_spans) == 1


def test_lengths_count_all_tokens_of_an_image(columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    """Rule R3: a prompt is never cut, and is left out by its expanded length."""
    rows = [
        {"problem": "<image>", "answer": "x", "images": uri(png(i, size, size))} for i, size in enumerate((28, 280))
    ]
    path, tokenizer = write_lines(tmp_path, *rows), load_tokenizer(str(model))
    lengths = [len(s.prompt_tokens) for s in load_prompts(path, tokenizer, columns).samples]  # type: ignore[arg-type]
    assert lengths[1] - lengths[0] == 64 - 1  # of 100 tokens' pixels the limit leaves 64
    limited = PromptColumns("problem", "answer", "metadata", None, True, None, lengths[0], images=columns.images)
    kept = load_prompts(path, tokenizer, limited)
    assert (len(kept.samples), kept.num_too_long) == (1, 1)


# ------------------------------------------------------------------------------------------------ supervised
def test_supervised_samples_with_images(columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    answered = [{"role": "user", "content": "See <image>?"}, {"role": "assistant", "content": "Yes."}]
    more = [*answered, {"role": "user", "content": "And <image>"}, {"role": "assistant", "content": "No."}]
    ids = [1, 2, IMAGE, 3, 4]
    rows: list[Row] = [
        {"problem": more, "answer": "", "images": [uri(png(0)), uri(png(1, 28, 28))]},
        {"problem": "Is <image> it?", "answer": "Yes.", "images": [uri(png(0))]},
        {"problem": "Text?", "answer": "Yes."},
        {"tokens": ids, "loss_mask": [0, 0, 0, 1, 1], "images": [uri(png(0))], "problem": "", "answer": ""},
    ]
    args = Namespace(
        hf_checkpoint=str(model),
        loss_mask_type="auto",
        apply_chat_template_kwargs={},
        multimodal_keys={"image": "images"},
    )
    loaded = load_conversations(write_lines(tmp_path, *rows), columns).samples
    samples = [to_sft_sample(args, sample) for sample in loaded]
    assert [len(sample.image_spans) for sample in samples] == [2, 1, 0, 1]
    tokenizer = load_tokenizer(str(model))
    for sample in samples:
        sample.validate()
        mask = np.asarray(sample.array("loss_mask"))
        said = np.asarray(sample.array("tokens"))[sample.prompt_length :][mask == 1]
        text = tokenizer.decode(said)
        assert text in ("Yes.<|im_end|>No.<|im_end|>", "Yes.<|im_end|>", tokenizer.decode([3, 4]))
    assert samples[3].array("tokens").tolist() == [1, 2, *[IMAGE] * 6, 3, 4]  # type: ignore[union-attr]
    said = [{"role": "user", "content": "A tag of images?"}, {"role": "assistant", "content": "<image> or <video>."}]
    rows = [{"problem": said, "answer": ""}, rows[3] | {"problem": "For people: <|image_pad|> <video>"}]
    tagged, tokens = load_conversations(write_lines(tmp_path, *rows), columns).samples
    assert tagged.prompt == said and not tagged.image_spans and len(tokens.image_spans) == 1
    seen = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "image"}]}]
    path = write_lines(tmp_path, {"problem": seen, "images": uri(png(0)), "answer": ""})
    (sample,) = load_conversations(path, columns).samples
    with pytest.raises(ValueError, match="an image in a turn of the assistant cannot be trained on"):
        to_sft_sample(args, sample)


# ------------------------------------------------------------------------------------------------ samples and hooks
@pytest.fixture
def sample(columns: PromptColumns, model: Path, tmp_path: Path) -> Sample:
    row = {"problem": "<image> or <image>", "answer": "x", "images": [uri(png(0)), uri(png(1, 28, 28))]}
    (sample,) = load_prompts(write_lines(tmp_path, row), load_tokenizer(str(model)), columns).samples
    assert columns.images is not None
    IMAGES.configure(1 << 20, None, columns.images.processor)
    sample.tokens = sample.prompt_tokens  # type: ignore[assignment]
    return sample


def test_hooks_see_slimes_shape(sample: Sample) -> None:
    copied = copy.deepcopy(sample)
    inputs = copied.multimodal_inputs
    assert inputs is not None and list(inputs) == ["images", "videos"] and isinstance(inputs["images"], list)
    refs = [image for _, image in sample.image_spans]
    assert all(image is ref for (_, image), ref in zip(copied.image_spans, refs, strict=True)), "siblings share them"
    assert [np.asarray(image).shape for image in inputs["images"]] == [(ref.height, ref.width, 3) for ref in refs]
    train = copied.multimodal_train_inputs
    assert train is not None and train["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]
    assert train["pixel_values"].shape == (28, 1176)
    assert images_of(copied) == refs
    # Hooks of slime note no places: the images are those of the runs of placeholders.
    processor = IMAGES.processor
    assert processor is not None
    for more in ({}, {"multimodal_train_inputs": train}):
        given: dict[str, Any] = {"multimodal_inputs": inputs} | more
        made = Sample(tokens=[*copied.tokens, IMAGE, 5], response_length=2, **given)
        adopt_images(made, processor)
        made.validate()
        assert [place for place, _ in made.image_spans] == [place for place, _ in sample.image_spans]
        assert all(
            np.array_equal(IMAGES.pixels(a), IMAGES.pixels(b)) for (_, a), b in zip(made.image_spans, refs, strict=True)
        )
    changed = copy.deepcopy(sample)  # a function that made other tokens of the prompt
    assert changed.multimodal_inputs is not None
    changed.tokens = [7, *copied.tokens]
    adopt_images(changed, processor)
    assert [place for place, _ in changed.image_spans] == [place + 1 for place, _ in sample.image_spans]
    lost = Sample(index=4, tokens=[1, IMAGE], multimodal_inputs=inputs)
    with pytest.raises(
        ValueError, match=r"sample 4 has 2 images .*, but its tokens have no run of 6 placeholders \(261\) for image 1"
    ):
        adopt_images(lost, processor)


def other(seed: int, height: int = 56, width: int = 84) -> Image.Image:
    return Image.open(io.BytesIO(png(seed, height, width)))


def keys_of(sample: Sample) -> list[str]:
    assert IMAGES.processor is not None
    adopt_images(sample, IMAGES.processor)
    sample.validate()
    return [image.key for _, image in sample.image_spans]


def given(sample: Sample) -> list[Any]:
    assert sample.multimodal_inputs is not None
    return sample.multimodal_inputs["images"]


def test_a_hook_replaces_images(sample: Sample) -> None:
    """What it put in another's stead is what engines and trainers see, or an error: never ignored."""
    assert IMAGES.processor is not None
    before = [image.key for _, image in sample.image_spans]
    given(sample)[0] = other(9)
    first, second = keys_of(sample)
    assert first not in before and second == before[1]
    assert np.array_equal(np.asarray(given(sample)[0]), np.asarray(other(9)))
    ImageDraw.Draw(given(sample)[1]).point((3, 3), (1, 2, 3))
    assert keys_of(sample)[0] == first and keys_of(sample)[1] != second
    assert given(sample)[1].getpixel((3, 3)) == (1, 2, 3)
    for change, problem in (
        (lambda images: images.__setitem__(1, other(9)), "1 placeholders for image 2, which has 6 tokens"),
        (lambda images: images.__setitem__(slice(None), [other(9)]), "has 1 images .* but 2 among its tokens"),
        (lambda images: images.append(other(9)), "no run of 6 placeholders .* for image 3"),
    ):
        changed = copy.deepcopy(sample)
        change(given(changed))
        with pytest.raises(ValueError, match=problem):
            adopt_images(changed, IMAGES.processor)
    changed = copy.deepcopy(sample)
    given(changed).append(other(9))
    changed.append_response_tokens(tokens=[5, *[IMAGE] * 7, 5, *[IMAGE] * 6, 5], trainable=False)  # 7 are another's
    place = sample.num_tokens + 9
    assert len(keys_of(changed)) == 3 and changed.image_spans[2][0] == place
    again = copy.deepcopy(sample)  # an image of the row a second time
    given(again).append(given(again)[0])
    again.append_response_tokens(tokens=[5, *[IMAGE] * 6, 5], trainable=False)
    assert keys_of(again) == [first, again.image_spans[1][1].key, first]


def test_pixels_that_a_hook_sets(sample: Sample) -> None:
    """Those of the processor, as slime's functions set them, are the images' own; others are refused."""
    assert IMAGES.processor is not None
    before, train = [image.key for _, image in sample.image_spans], sample.multimodal_train_inputs
    assert train is not None
    sample.multimodal_train_inputs = train
    assert keys_of(sample) == before and vars(sample)["multimodal_train_inputs"] is None
    for wrong in (train | {"pixel_values": train["pixel_values"] + 0.1}, {"pixel_values": train["pixel_values"]}):
        sample.multimodal_train_inputs = wrong
        with pytest.raises(ValueError, match="of multimodal_train_inputs are not those of its 2 images"):
            adopt_images(sample, IMAGES.processor)
    with pytest.raises(ValueError, match="are not those of its 0 images"):
        adopt_images(Sample(tokens=[1], multimodal_train_inputs=train), IMAGES.processor)


def test_a_tool_s_file_is_copied(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "crop.png").write_bytes(png(9))
    ref = as_ref(str(tmp_path / "crop.png"), IMAGES.processor)
    (tmp_path / "crop.png").unlink()
    IMAGES.configure(0, None, IMAGES.processor)  # a cache of nothing
    assert np.array_equal(IMAGES.pixels(ref), np.asarray(other(9)))
    for broken in (png(9)[:9000], Image.open(io.BytesIO(png(8)[:9000])), "gone.png", uri(png(7)[:9000])):
        with pytest.raises(ValueError, match="decoded|cannot be read"):
            as_ref(broken, IMAGES.processor)


def test_files_and_checkpoints_keep_references(sample: Sample) -> None:
    for read in (False, True):
        if read:
            assert sample.multimodal_inputs is not None
        packed = json.loads(json.dumps(pack_sample(sample)))
        assert "multimodal_inputs" not in packed and list(images_in(packed)) == images_of(sample)
        restored = unpack_sample(packed)
        assert restored.image_spans == list(sample.image_spans)
        assert restored.image_spans[0][1] is sample.image_spans[0][1]
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).image_spans == list(sample.image_spans)
    inputs = sample.multimodal_inputs
    assert inputs is not None
    inputs["images"].append(Image.open(io.BytesIO(png(7))))
    restored = unpack_sample(json.loads(json.dumps(pack_sample(sample))))
    assert restored.multimodal_inputs is not None
    assert images_of(restored, IMAGES.processor) == images_of(sample, IMAGES.processor)
    assert len(images_of(restored, IMAGES.processor)) == 3
    # Rows for people, and samples without tokens: images of hooks become references.
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert images_of(again) == images_of(sample, IMAGES.processor)[:2] and again.image_spans == list(sample.image_spans)
    blank = Sample(multimodal_inputs={"images": [other(7)], "own": 1})
    assert IMAGES.processor is not None
    adopt_images(blank, IMAGES.processor)
    assert "multimodal_inputs" not in blank.to_dict()
    restored = unpack_sample(json.loads(json.dumps(pack_sample(blank))))
    assert images_of(restored) == images_of(blank) and (restored.multimodal_inputs or {})["own"] == 1


def test_rows_of_text_say_nothing_of_images(columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"problem": "Text.", "answer": "x"})
    for each in (columns, dataclasses.replace(columns, images=None)):
        (text,) = load_prompts(path, load_tokenizer(str(model)), each).samples
        assert not {"image_spans", "multimodal_inputs"} & text.to_dict().keys()
        assert "image_spans" not in pack_sample(text)


def test_images_that_join_later(sample: Sample) -> None:
    (_, ref), *_ = sample.image_spans
    for reads in (False, True):
        joined = copy.deepcopy(sample)
        if reads:
            assert joined.multimodal_inputs is not None
        place = joined.num_tokens
        joined.append_response_tokens(tokens=[IMAGE] * ref.num_tokens, trainable=False)
        add_images(joined, [(place, ref)])
        joined.validate()
        assert joined.multimodal_inputs is not None and len(joined.multimodal_inputs["images"]) == 3
        assert images_of(joined) == [*images_of(sample), ref]


def test_another_prompt_keeps_the_images(sample: Sample, model: Path) -> None:
    sample.tokens, images = [], images_of(sample)
    sample.prompt = "Otherwise: " + str(sample.prompt)
    assert sample.prompt_tokens is None and not sample.image_spans and images_of(sample) == images
    args = Namespace(hf_checkpoint=str(model))
    sample.tokens = prompt_tokens(args, sample)
    sample.validate()
    assert images_of(sample) == images == [image for _, image in sample.image_spans]
    # It begins anew: after an abort, or as another sample of the prompt.
    ids = np.asarray(sample.array("tokens"))
    for again in (copy.deepcopy(sample), prompt_of(sample)):
        clear_response(again)
        for _ in range(2):  # also where a hook asked for the tokens before
            tokens = prompt_tokens(args, again)
            assert tokens.tolist() == ids.tolist() and images_of(again) == images
        again.tokens = tokens
        again.validate()


# ------------------------------------------------------------------------------------------------ broken inputs
_GOOD = {"problem": "See <image>", "answer": "1", "images": ["ok.png"]}


def _message(*parts: object) -> list[Row]:
    return [{"role": "user", "content": list(parts)}]


_TEXT = {"type": "text", "text": "?"}
BROKEN: dict[str, tuple[Row, str]] = {
    "missing column": ({"images": None}, "column 'images' (--multimodal-keys) is missing, but the prompt has a"),
    "too few": ({"problem": "<image><image>"}, "column 'images' has fewer images than the prompt has placeholders (1"),
    "too many": ({"images": ["ok.png", "ok.png"]}, "has more images than the prompt has placeholders (2 images, 1 pl"),
    "no placeholder": (
        {"problem": "See"},
        "has more images than the prompt has placeholders (1 images, 0 placeholders",
    ),
    "url": ({"images": ["http://x.org/a.png"]}, "an image is a URL (image 1: http://x.org/a.png); download it first"),
    "no file": ({"images": ["gone.png"]}, "gone.png': No such file or directory); relative paths begin in the folder"),
    "not an image": ({"images": ["text.png"]}, "it is not an image file of a known format (image 1)"),
    "cut off": ({"images": ["cut.png"]}, "the image cannot be"),
    "thin": ({"images": ["thin.png"]}, "one side of the image is over 200 times the other (image 1: 300 x 1 pixels)"),
    "no messages": ({"problem": ["a", "b"]}, "column 'problem' is neither text nor a list of messages"),
    "number": ({"images": [7]}, "the kind of an image is unknown (image 1: int 7)"),
    "cut off late": ({"images": ["late.png"]}, "the image cannot be decoded (image 1: "),
    "base64": ({"images": [base64.b64encode(png(0)).decode()]}, "the file of an image cannot be read"),
    "bad uri": ({"images": ["data:image/png;base64,@@"]}, "an image is a data: URI that cannot be read"),
    "video part": (
        {"problem": _message({"type": "video", "video": "v.mp4"}, _TEXT)},
        "has a part of the type 'video'; on",
    ),
    "video placeholder": (
        {"problem": "<image> <video>", "videos": ["v.mp4"]},
        "has a placeholder <video>; only images are trained on",
    ),
    "image_url without": (
        {"problem": _message({"type": "image_url"}, _TEXT)},
        "a part of the type 'image_url' without an",
    ),
    "own placeholder": (
        {"problem": "<image> <|image_pad|>"},
        "column 'problem': a text holds <|image_pad|>, which means an image; write <image> for an image",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_has_one_line(name: str, columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    """Acceptance point A19."""
    (tmp_path / "ok.png").write_bytes(png(0))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").write_text("")
    (tmp_path / "cut.png").write_bytes(png(0)[:20])
    (tmp_path / "late.png").write_bytes(png(0)[: len(png(0)) * 2 // 3])
    (tmp_path / "thin.png").write_bytes(png(0, 1, 300))
    changes, wanted = BROKEN[name]
    path = write_lines(tmp_path, _GOOD, _GOOD | changes | {"answer": "2"})
    check = DataCheck(columns, load_tokenizer(str(model)))
    errors, _ = check.problems(str(path))
    assert len(errors) == 1 and "line 2: " in errors[0] and wanted in errors[0]
    if name == "cut off late":  # a run reads headers alone when it begins
        _, late = load_prompts(path, load_tokenizer(str(model)), columns).samples
        with pytest.raises(ValueError, match=r"late\.png: the image cannot be decoded"):
            IMAGES.pixels(late.image_spans[0][1])
        return
    with pytest.raises(ValueError, match="line 2: "):
        load_prompts(path, load_tokenizer(str(model)), columns)


def test_a_template_without_images(columns: PromptColumns, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ok.png").write_bytes(png(0))
    path = write_lines(tmp_path, _GOOD)
    for template, wanted in (
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "writes parts of a content"),
        (
            CHAT_TEMPLATE.replace("<|image_pad|>", ""),
            "the chat template does not write one <|image_pad|> for each image",
        ),
    ):
        tokenizer = copy.deepcopy(load_tokenizer(str(model)))
        tokenizer.chat_template = template
        errors, _ = DataCheck(columns, tokenizer).problems(str(path))
        assert len(errors) == 1 and wanted in errors[0]


def test_the_same_text_with_another_image_is_another_prompt(
    columns: PromptColumns, model: Path, tmp_path: Path
) -> None:
    """Rule R19."""
    rows = [_GOOD | {"images": [uri(png(seed))], "answer": str(seed)} for seed in (0, 1, 0)]
    errors, warnings = DataCheck(columns, load_tokenizer(str(model))).problems(str(write_lines(tmp_path, *rows)))
    assert not errors and len(warnings) == 1 and "line 3: the same prompt as an earlier row" in warnings[0]


def test_the_command_and_its_flags(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ok.png").write_bytes(png(0))
    path = write_lines(tmp_path, _GOOD)
    flags = ["--input-key", "problem", "--label-key", "answer", "--apply-chat-template"]
    keys = ["--multimodal-keys", '{"image": "images"}']

    def check(*more: str) -> tuple[int, str]:
        code = data_command.run(["check", str(path), *flags, *more])
        output = capsys.readouterr()
        return code, output.out + output.err

    code, text = check(*keys, "--hf-checkpoint", str(model))
    assert code == 0 and "1 rows, prompt tokens min 31" in text and "no problem" in text
    for more, wanted in (
        ([*keys], "--multimodal-keys: which sizes images have is the model's matter: give --hf-checkpoint"),
        (["--multimodal-keys", '{"video": "v"}'], "--multimodal-keys: video: only images are trained on"),
        ([*keys, "--hf-checkpoint", str(model), "--image-max-pixels", "20"], "--image-max-pixels 20: a token of"),
        (
            [*keys, "--hf-checkpoint", str(model), "--multimodal-folder", "gone"],
            "--multimodal-folder gone: there is no",
        ),
    ):
        code, text = check(*more)
        assert code == 2 and wanted in text, text
