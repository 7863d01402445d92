"""Samples with images against a scripted engine: what it is asked, tools that answer with images, zooming, limits."""

import asyncio
import copy
import dataclasses
import gc
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from fusionrl.buffer.actor import open_image_store
from fusionrl.compat.slime.api.datasets import encode_image_for_rollout_engine
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.data import image_store
from fusionrl.data.image_store import IMAGES, MEGABYTE
from fusionrl.data.images import collapsed, normal_form, read_processor_files
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import adopt_images, images_of, keep_images, set_images
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.answers import AnswerError, Generation
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.request_routing import RequestMerger
from fusionrl.rollout.agent import generate as generate_with_tools
from fusionrl.rollout.engine_post import post
from fusionrl.rollout.image_requests import FOLDER, image_data, image_metrics, media_tokens, with_images
from fusionrl.rollout.request_seeds import sampling
from fusionrl.rollout.sglang_rollout import generate, stream_generate
from fusionrl.rollout.tools import ToolError
from fusionrl.rollout.types import Limits, check_samples
from fusionrl.rollout.weight_versions import noting_answers
from fusionrl.rollout.zoom import ZoomTool, box_in_original
from tests.engines import streaming
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, needs, pictures
from tests.tiny_model import make_byte_tokenizer
from tests.tiny_vision import IMAGE, VISION_TOKENS, config_of, image_numbers

pytestmark = needs("sglang", "PIL")
HOOKS = Path(__file__).with_name("image_hooks.py")
UNIT = 32  # pixels of a token's side
# As Qwen3-VL's: a tool's answer within a user's turn, images as they come.
TEMPLATE = """
{%- macro show(content) %}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endmacro %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ show(m.content) }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ show(m.content) }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ show(m.content) }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model that sees: everything but its weights."""
    path = tmp_path_factory.mktemp("seeing") / "model"
    tokenizer = make_byte_tokenizer(1 << 16, more=VISION_TOKENS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config_of("qwen3_vl").save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(image_numbers("qwen3_vl")))
    return str(path)


@pytest.fixture(autouse=True)
def store(seeing: str) -> Iterator[None]:
    """The store of images knows the model."""
    IMAGES.configure(64 * MEGABYTE, None, read_processor_files(seeing))
    yield
    IMAGES.configure(64 * MEGABYTE, None)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded, resized or encoded on an event loop, which it would hold up."""

    def checked(function: Any) -> Any:
        def call_apart(*args: Any) -> Any:
            assert asyncio._get_running_loop() is None, f"{function.__name__} on an event loop"
            return function(*args)

        return call_apart

    for name in ("png_of", "decoded", "resized"):
        monkeypatch.setattr(image_store, name, checked(getattr(image_store, name)))


@pytest.fixture
def play(seeing: str) -> Callable[..., tuple[Sample, Engine]]:
    """play([turn, …], image, …, flag=value) -> (finished sample, engine); an agent's where there are tools."""

    def start(turns: list[Turn | str], *images: Image.Image, **changes: Any) -> tuple[Sample, Engine]:
        sample = asking(seeing, *images)
        flags = {"apply_chat_template": True, "tool_call_parser": "qwen25", "image_transport": "data"} | changes
        args, engine = scripted.prepare(seeing, turns, **flags)
        engine.image_unit = UNIT
        make = generate_with_tools if "tools_path" in changes else generate
        engine.serve(args, lambda: make(args, sample, scripted.sampling_params(args)))
        return sample, engine

    return start


def asking(folder: str, *images: Image.Image) -> Sample:
    """A sample whose prompt shows the images and asks."""
    parts = [{"type": "image"} for _ in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    sample = Sample(index=0, prompt="?", messages=messages)
    limits = read_processor_files(folder).limits
    set_images(sample, [IMAGES.add_picture(image, limits) for image in images])
    text = f"<|im_start|>user\n{IMAGE_TEXT * len(images)}Which?<|im_end|>\n<|im_start|>assistant\n"
    whole = with_images(load_tokenizer(folder).encode(text), images_of(sample))
    sample.prompt_tokens, sample.image_spans = whole.ids, whole.spans
    return sample


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    assert IMAGES.processor is not None
    return normal_form(image, IMAGES.processor.limits)


def check(sample: Sample, engine: Engine) -> None:
    """Each request has the sample's tokens so far, collapsed, and all images before them."""
    sample.validate()
    tokens, place = np.asarray(sample.tokens), sample.prompt_length
    for exchange in engine.exchanges:
        said = exchange.tokens
        place = next(p for p in range(place, len(tokens)) if tokens[p : p + len(said)].tolist() == said)
        before = [span for span in sample.image_spans if span[0] < place]
        assert exchange.asked["input_ids"] == collapsed(tokens[:place], before).tolist()
        shown = [np.asarray(image) for image in pictures(exchange.asked)]
        assert len(shown) == len(before)
        for (_, image), one in zip(before, shown, strict=True):
            np.testing.assert_array_equal(IMAGES.pixels(image), one)
        place += len(said)


def test_a_request_has_the_images_of_its_sample(play: Any) -> None:
    first, second = noise(64, 64), noise(128, 96, 1)
    sample, engine = play(["Both."], first, second)
    check(sample, engine)
    (asked,) = (exchange.asked for exchange in engine.exchanges)
    assert asked["input_ids"].count(IMAGE) == 2 and sample.tokens.count(IMAGE) == 4 + 12
    np.testing.assert_array_equal(np.asarray(pictures(asked)[1]), pixels(second))
    assert sample.status == Sample.Status.COMPLETED
    assert image_metrics([sample]) == {
        "rollout/images": 2.0,
        "rollout/image_tokens": 16.0,
        "rollout/sampled_placeholders": 0.0,
    }


def test_images_as_files_live_as_long_as_their_samples(play: Any, tmp_path: Path) -> None:
    flags = {"image_transport": "file"}
    sample, engine = play(["One."], noise(64, 64), run_dir=str(tmp_path), **flags)
    check(sample, engine)
    (address,) = engine.exchanges[0].asked["image_data"]
    path = Path(address.removeprefix("file://"))
    assert path.parent.parent == tmp_path and path.is_file()
    again = dataclasses.replace(sample.image_spans[0][1])  # the next reference to the image, while the last one goes
    (newer,) = image_data(Namespace(run_dir=str(tmp_path), **flags), [again])
    del sample
    gc.collect()
    assert not path.exists() and Path(newer.removeprefix("file://")).is_file()


def test_a_new_buffer_removes_the_files_of_one_that_was_killed(seeing: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "half-written.7").write_bytes(b"")
    config = Config.from_flat({"hf_checkpoint": seeing, "multimodal_keys": {"image": "images"}})
    open_image_store(config, Mock(), tmp_path)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.usefixtures("apart")
def test_siblings_wait_for_their_image_and_are_sent_together(seeing: str) -> None:
    """Its PNG is made apart from the event loop, once."""
    sample = asking(seeing, noise(64, 64))
    samples = [copy.deepcopy(sample) for _ in range(3)]
    args, _ = scripted.prepare(seeing, [], rollout_max_response_len=4, image_transport="data")
    sent: list[Any] = []

    async def send(payload: Any, body: bytes | None) -> list[Generation]:
        sent.append(payload)
        one = Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), "", "length", [(0, 1)], len(whole), 0, {})
        return [one for _ in payload["image_data"]]

    async def run() -> None:
        merger = RequestMerger(send)
        args.generate_client = Mock(generate=lambda payload, _: merger.generate(payload))
        params = scripted.sampling_params(args)

        async def ask(number: int, one: Sample) -> None:
            with sampling(args, number, number):  # as `generate_group` does
                await generate(args, one, params)

        await asyncio.gather(*(ask(number, one) for number, one in enumerate(samples)))

    whole = np.asarray(sample.prompt_tokens)
    asyncio.run(run())
    assert [len(request["image_data"]) for request in sent] == [3]


def test_an_engine_that_cuts_images_otherwise_is_an_error(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "num_repeated", lambda self, asked: 2)
    with pytest.raises(AnswerError, match="prompt_tokens is 30, and sample 0 had 31 tokens"):
        play(["One."], noise(64, 64))


def test_functions_for_slime_ask_with_all_placeholders(seeing: str) -> None:
    """As slime's example of geometry3k: ids of a processor, images as it encodes them, no span noted."""
    sample = asking(seeing, noise(64, 64), noise(128, 96, 1))
    ids, uris = sample.prompt_tokens, [encode_image_for_rollout_engine(image) for image in images_of_hook(sample)]
    args, engine = scripted.prepare(seeing, ["Both."])
    engine.image_unit = UNIT

    async def ask(tokens: list[int]) -> Any:
        with noting_answers([args.router_url]):
            params = {"max_new_tokens": 9, "temperature": 1.0}
            payload = {"input_ids": tokens, "image_data": uris, "sampling_params": params}
            return await post(f"{args.router_url}/generate", payload, max_retries=1)

    assert ids is not None and list(ids).count(IMAGE) == 16
    answer = engine.serve(args, lambda: ask(list(map(int, ids))))
    (asked,) = (exchange.asked for exchange in engine.exchanges)
    assert asked["input_ids"] == collapsed(ids, sample.image_spans).tolist() and asked["image_data"] == uris
    made = Sample(tokens=[*ids, *answer["output_ids"]], response_length=6, multimodal_inputs=sample.multimodal_inputs)
    assert IMAGES.processor is not None
    adopt_images(made, IMAGES.processor)
    assert made.image_spans == sample.image_spans


def test_an_image_that_is_changed_in_place(seeing: str) -> None:
    """Before the turn, the engine sees the change; after it, there is none."""
    sample = asking(seeing, noise(64, 64), noise(128, 96, 1))
    before = [image.key for _, image in sample.image_spans]
    args, engine = scripted.prepare(seeing, ["Both."])
    engine.image_unit = UNIT
    images_of_hook(sample)[0].putpixel((3, 3), (1, 2, 3))
    engine.serve(args, lambda: generate(args, sample, scripted.sampling_params(args)))
    check(sample, engine)
    seen = [image.key for _, image in sample.image_spans]
    assert seen[0] != before[0] and seen[1] == before[1] and IMAGES.processor is not None
    for image in images_of_hook(sample):
        image.load()
        image.close()
    adopt_images(sample, IMAGES.processor)
    images_of_hook(sample)[1].putpixel((3, 3), (1, 2, 3))
    changed = copy.deepcopy(sample)
    with pytest.raises(ValueError, match="image 2 is not the one that the engine saw"):
        adopt_images(changed, IMAGES.processor)
    check_samples("rollout_sample_hook_path", "", [sample], Limits())
    keep_images([changed])
    for kept in (sample, changed):
        assert [image.key for _, image in kept.image_spans] == seen == [image.key for image in images_of(kept)]


def images_of_hook(sample: Sample) -> list[Any]:
    inputs = sample.multimodal_inputs
    assert inputs is not None
    images: list[Any] = inputs["images"]
    return images


# ------------------------------------------------------------------------------------------------ placeholders
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_sampled_placeholder_ends_a_sample_that_would_go_on(play: Any, token: str) -> None:
    sample, engine = play([f"It {token} is."], noise(64, 64))
    check(sample, engine)
    assert sample.status == Sample.Status.COMPLETED and np.all(sample.loss_mask)
    assert image_metrics([sample])["rollout/sampled_placeholders"] == 1.0

    said = token + call("image_zoom_in_tool", bbox_2d=[0, 0, 500, 500])
    sample, engine = play([said, "never said"], noise(64, 64), tools_path="fusionrl.rollout.zoom.tools")
    assert (sample.status, len(engine.exchanges)) == (Sample.Status.TRUNCATED, 1)
    assert len(sample.image_spans) == 1 and sample.metadata["num_turns"] == 1, "its tools have not run"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_placeholder_of_an_engine_that_died_ends_its_sample(seeing: str, is_streamed: bool) -> None:
    """No engine may continue, and none says which experts it chose."""
    sample = asking(seeing, noise(UNIT, UNIT))
    assert sample.prompt_tokens is not None
    served = streaming.Engine([97, IMAGE, 99, 100], len(sample.prompt_tokens), [("die", 3)])
    args, _ = scripted.prepare(seeing, [], image_transport="data")
    args.routed_experts_size = (3, 2)

    async def use(url: str) -> None:
        async with GenerateClient(url, media=media_tokens(), stream_responses=True) as args.generate_client:
            if is_streamed:
                async for _ in stream_generate(args, sample, scripted.sampling_params(args)):
                    pass
            else:
                await generate(args, sample, scripted.sampling_params(args))

    streaming.serve(served, use)
    sample.validate()
    assert (sample.status, sample.response_length) == (Sample.Status.TRUNCATED, 3)
    assert sample.rollout_routed_experts is None


# ------------------------------------------------------------------------------------------------ zoom
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("coordinates", "scale"), [("auto", 1000), ("pixels", 256)])
def test_the_model_sees_a_part_of_the_original(play: Any, coordinates: str, scale: int) -> None:
    original = noise(1024, 1024)  # of which the model sees 256 x 256
    box = [scale / 2, 0, scale, scale / 2]
    said = call("image_zoom_in_tool", bbox_2d=box, label="the corner")
    flags = {"tools_path": "fusionrl.rollout.zoom.tools", "zoom_coordinates": coordinates}
    sample, engine = play([said, "Blue."], original, **flags)
    check(sample, engine)
    assert sample.status == Sample.Status.COMPLETED and sample.metadata["num_tool_errors"] == 0
    (_, whole), (place, part) = sample.image_spans
    np.testing.assert_array_equal(IMAGES.pixels(whole), pixels(original))
    np.testing.assert_array_equal(IMAGES.pixels(part), pixels(original.crop((512, 0, 1024, 512))))
    at = place - sample.prompt_length
    assert not np.any(sample.loss_mask[at : at + part.num_tokens])
    assert sample.loss_mask.count(1) == len(said) + 1 + len("Blue.") + 1
    assert f"<tool_response>\n{IMAGE_TEXT}The part {box} of image 0: the corner\n</tool_response>" in sample.response


def test_a_part_of_a_part(play: Any) -> None:
    original = noise(1024, 1024)
    first = call("image_zoom_in_tool", bbox_2d=[0, 0, 500, 500])
    second = call("image_zoom_in_tool", bbox_2d=[500, 500, 1000, 1000], image_index=1.0)
    sample, engine = play([first, second, "Red."], original, tools_path="fusionrl.rollout.zoom.tools")
    check(sample, engine)
    np.testing.assert_array_equal(IMAGES.pixels(sample.image_spans[2][1]), pixels(original.crop((256, 256, 512, 512))))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bbox_2d": [5, 5, 5, 9]}, "give [x1, y1, x2, y2] with x1 < x2 and y1 < y2"),
        ({"bbox_2d": [1500, 0, 1600, 9]}, "lies outside the image, which is 1000 x 1000"),
        ({"bbox_2d": [1, 2, 3]}, "wrong arguments for image_zoom_in_tool: [1, 2, 3] is too short"),
        ({"bbox_2d": [0, 0, 9, 9], "image_index": 1}, "image_index 1: there are 1 images, the first is 0"),
    ],
)
def test_boxes_that_the_model_is_to_mend(play: Any, arguments: dict[str, Any], told: str) -> None:
    said = call("image_zoom_in_tool", **arguments)
    sample, engine = play([said, "Oh."], noise(64, 64), tools_path="fusionrl.rollout.zoom.tools")
    check(sample, engine)
    assert f"error: {'' if 'wrong' in told or 'index' in told else 'bbox_2d'}" in sample.response
    assert told in sample.response
    assert (len(sample.image_spans), sample.metadata["num_tool_errors"]) == (1, 1)


def test_limits_of_tools_images(play: Any) -> None:
    """Their number, and the room that is left."""
    said, zoom = call("image_zoom_in_tool", bbox_2d=[0, 0, 900, 900]), "fusionrl.rollout.zoom.tools"
    sample, engine = play([said, said, "Oh."], noise(64, 64), tools_path=zoom, max_tool_images=1)
    check(sample, engine)
    assert "error: there may be no more than 1 images" in sample.response
    assert (len(sample.image_spans), sample.metadata["num_tool_errors"]) == (2, 1)

    limit = sample.prompt_length + len(said) + 1 + 100  # the part has 64 tokens, and others around it
    large = noise(256, 256)
    sample, engine = play([said, "never said"], large, tools_path=zoom, rollout_max_context_len=limit + 60)
    assert (sample.status, len(engine.exchanges), len(sample.image_spans)) == (Sample.Status.TRUNCATED, 1, 1)
    assert sample.response_length == len(said) + 1


def test_images_of_a_tool_of_one_s_own(play: Any) -> None:
    """Several, of files too; the model reads of one that cannot be used; a mistake of the tool is raised."""
    tools = f"{HOOKS}:tools"
    said = [call("draw", what=what) for what in ("two", "thin", "cut", "cut while it is read")]
    sample, engine = play([*said, "Oh."], noise(64, 64), tools_path=tools)
    check(sample, engine)
    assert [image.num_tokens for _, image in sample.image_spans] == [4, 4, 4]
    assert f"<tool_response>\n{IMAGE_TEXT}{IMAGE_TEXT}\n</tool_response>" in sample.response
    assert "error: one side of the image is over 200 times the other" in sample.response
    assert sample.response.count("the image cannot be decoded") == 2 and sample.metadata["num_tool_errors"] == 3
    with pytest.raises(HookError, match="the tool 'draw': KeyError"):
        play([call("draw", what="nothing")], noise(64, 64), tools_path=tools)
    IMAGES.configure(MEGABYTE, None)
    with pytest.raises(ValueError, match="the model gets none: give --multimodal-keys"):
        play([call("draw", what="two")], tools_path=tools)


def test_the_tool_of_the_page(play: Any, tmp_path: Path) -> None:
    """docs/guides/agents.md: a tool that draws into the image of the prompt."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
    file = tmp_path / "draw_line.py"
    file.write_text(page.split("# my_task/draw_line.py\n")[1].split("```")[0])
    said = [call("draw_line", line=line) for line in ([0, 500, 1000, 500], [0, 0, 2000, 0])]
    sample, engine = play([*said, "Oh."], Image.new("RGB", (64, 128)), tools_path=f"{file}:tools")
    check(sample, engine)
    (_, whole), (_, drawn) = sample.image_spans
    is_red = (IMAGES.pixels(drawn) == (255, 0, 0)).all(-1)
    assert is_red[64].all() and is_red.sum() == 3 * 64 and not IMAGES.pixels(whole).any()
    assert f"{IMAGE_TEXT}The image with your line." in sample.response
    assert "error: a line has numbers from 0 to 1000" in sample.response


def test_a_part_in_pixels_of_the_original() -> None:
    """Clamped, whole pixels, and never smaller than 28 of them."""
    assert box_in_original([0, 0, 1000, 1000], (1000, 1000), (333, 77)) == (0, 0, 333, 77)
    assert box_in_original([-9, 250, 500, 10**400], (1000, 1000), (400, 200)) == (0, 50, 200, 200)
    assert box_in_original([500, 500, 501, 501], (1000, 1000), (400, 200)) == (187, 87, 215, 115)
    assert box_in_original([0, 0, 1, 1000], (1000, 1000), (400, 20)) == (0, 0, 28, 20)
    with pytest.raises(ToolError, match="too thin"):
        box_in_original([0, 0, 1000, 1], (1000, 1000), (4000, 4000))
    for box in ([0, 0, float("nan"), 1], [1.0, 0, 0, 1]):
        with pytest.raises(ToolError, match="give"):
            box_in_original(box, (10, 10), (10, 10))


def test_a_part_of_an_image_that_is_filled_up_with_black(tmp_path: Path) -> None:
    """Kimi-VL's: boxes count the black, too, and parts of the original have none."""
    (tmp_path / "config.json").write_text(json.dumps({"media_placeholder_token_id": IMAGE}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_numbers("kimi_vl")))
    processor = read_processor_files(tmp_path)
    IMAGES.configure(MEGABYTE, None, processor)
    original = noise(100, 42)
    image = IMAGES.add_picture(original, processor.limits)
    assert (image.width, image.height) == (112, 56)
    assert np.array_equal(IMAGES.pixels(image)[:42, :100], np.asarray(original))
    parts = {"pixels": [50, 0, 112, 56], "thousandths": [500 * 100 / 112, 0, 1000, 1000]}
    for coordinates, box in parts.items():
        part = ZoomTool(Sample(), coordinates)._cut(image, box)  # type: ignore[arg-type]
        assert np.array_equal(np.asarray(part), np.asarray(original)[:, 50:])
