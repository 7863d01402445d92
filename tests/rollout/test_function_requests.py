"""What `post` makes of a function's requests about images: several prompts, several answers, sampled placeholders."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from fusionrl.buffer.actor import open_image_store
from fusionrl.config.config import Config
from fusionrl.data.image_store import IMAGES, MEGABYTE
from fusionrl.data.images import ImageLimits, ImageRef, ProcessorFiles, png_of
from fusionrl.data.sample import Sample
from fusionrl.engines.answers import AnswerError
from fusionrl.rollout import engine_post
from fusionrl.rollout.engine_post import FunctionRequest, post
from fusionrl.rollout.image_requests import barred_parts, image_metrics
from fusionrl.rollout.weight_versions import noting_answers
from tests.tiny_vision import image_numbers

START, IMAGE, VIDEO = 7, 8, 9
LIMITS = ImageLimits(16, 2, 32 * 32, 256 * 256)
SIZES = [(64, 64), (128, 96)]
WHOLE = [[1, START, *[IMAGE] * 4, 2], [1, START, *[IMAGE] * 12, 2, 3]]
COLLAPSED = [[1, START, IMAGE, 2], [1, START, IMAGE, 2, 3]]
SAID = [4, IMAGE, 5]


def uri(width: int, height: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png_of(Image.new("RGB", (width, height)))).decode()


IMAGE_DATA = [[uri(*size)] for size in SIZES]


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    """The store of images knows the model."""
    IMAGES.configure(MEGABYTE, None, ProcessorFiles(LIMITS, (0.5,) * 3, (0.5,) * 3, IMAGE, (IMAGE, VIDEO), START))
    yield
    IMAGES.configure(MEGABYTE, None)


class Engine:
    """Answers `SAID`, and notes what it is asked; `num_more` tokens more are in a prompt than it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.num_more = 0
        monkeypatch.setattr(engine_post, "_post", self.post)

    async def post(self, url: str, payload: Any, *_: object) -> Any:
        self.asked.append((payload["input_ids"], payload.get("image_data")))
        is_batch = isinstance(payload["input_ids"][0], list)
        prompts = payload["input_ids"] if is_batch else [payload["input_ids"]]
        lengths = [len(WHOLE[COLLAPSED.index(prompt)]) + self.num_more for prompt in prompts]
        metas = [{"prompt_tokens": length, "finish_reason": {"type": "stop"}} for length in lengths]
        count = payload["sampling_params"]["n"]
        answers = [{"output_ids": SAID, "meta_info": meta} for meta in metas for _ in range(count)]
        return answers if is_batch or count > 1 else answers[0]


def posts(*requests: tuple[object, object], n: int = 1) -> list[Any]:
    """What one function gets for its requests, (input_ids, image_data) each."""

    async def ask() -> list[Any]:
        with noting_answers(["http://engine"]):
            fields = [{"input_ids": ids, "image_data": images} for ids, images in requests]
            params = {"sampling_params": {"n": n}}
            return [await post("http://engine/generate", {**one, **params}) for one in fields]

    return asyncio.run(ask())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("form", [WHOLE, COLLAPSED])
def test_several_prompts(monkeypatch: pytest.MonkeyPatch, form: list[list[int]], n: int) -> None:
    """Each has its images; one with a placeholder that the model has sampled goes to no engine."""
    engine = Engine(monkeypatch)
    first, second = posts((form, IMAGE_DATA), ([form[0], [*form[1], *SAID, 6]], IMAGE_DATA), n=n)
    assert engine.asked == [(COLLAPSED, IMAGE_DATA), (COLLAPSED[:1], IMAGE_DATA[:1])]
    assert [answer["output_ids"] for answer in first] == [SAID] * 2 * n
    assert [answer["output_ids"] for answer in second] == [SAID] * n + [[]] * n
    assert second[-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("n", [1, 2])
def test_one_prompt(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Its image may stand alone; the sample that a sampled placeholder ends is counted."""
    engine = Engine(monkeypatch)
    first, second = posts((WHOLE[0], IMAGE_DATA[0][0]), ([*WHOLE[0], *SAID], IMAGE_DATA[0][0]), n=n)
    assert engine.asked == [(COLLAPSED[0], IMAGE_DATA[0])]
    assert isinstance(first, list) == isinstance(second, list) == (n > 1)
    assert not (second[0] if n > 1 else second)["output_ids"]
    spans = [(2, ImageRef("", 64, 64, 4))]
    sample = Sample(tokens=[*WHOLE[0], *SAID], response_length=3, loss_mask=[1, 1, 1], image_spans=spans)
    assert image_metrics([sample])["rollout/sampled_placeholders"] == 1.0
    (part,) = barred_parts(sample)  # by which a later rollout's function knows it
    request = FunctionRequest.of({"input_ids": [*WHOLE[0], *SAID], "image_data": IMAGE_DATA[0]}, [part])
    assert request is not None and request.payload is None


@pytest.mark.parametrize(
    ("ids", "images", "error"),
    [
        ([*WHOLE[0], IMAGE], IMAGE_DATA[0], r"runs of \[4, 1\] placeholders, and the images have \[4\] tokens"),
        (COLLAPSED[0], None, "1 placeholders of images .* image_data has 0 images"),
        ([1, IMAGE], IMAGE_DATA[0], "no token 7, the start of an image, precedes"),
        ([*COLLAPSED[0], VIDEO], IMAGE_DATA[0], "input_ids have token 9"),
        (COLLAPSED, IMAGE_DATA[:1], "1 entries for 2 prompts"),
    ],
)
def test_placeholders_that_are_a_mistake(ids: object, images: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        posts((ids, images))


def test_an_engine_that_cuts_images_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.num_more = 1
    with pytest.raises(AnswerError, match="prompt_tokens is 8, and the request had 7 tokens"):
        posts((COLLAPSED[0], IMAGE_DATA[0]))


def test_images_of_a_set_with_limits_of_its_own(tmp_path: Path) -> None:
    """They are counted as engines do, whose limits leave the images of all sets as they are."""
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_numbers("qwen3_vl")))
    sets = {"eval": {"datasets": [{"name": "a", "path": "a.jsonl", "image_max_pixels": 64 * 64}]}}
    (tmp_path / "sets.yaml").write_text(json.dumps(sets))
    flags = {"hf_checkpoint": str(tmp_path), "multimodal_keys": {"image": "images"}, "image_max_pixels": 32 * 32}
    open_image_store(Config.from_flat(flags | {"eval_config": str(tmp_path / "sets.yaml")}), Mock(), tmp_path)
    request = FunctionRequest.of({"input_ids": WHOLE[0], "image_data": IMAGE_DATA[0]}, [])
    assert request is not None and request.num_tokens == [7]
