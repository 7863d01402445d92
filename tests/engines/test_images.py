"""Settings of engines that see, and requests that are refused before an engine gets them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.base.cpu_wing import PROCESSOR_VARIABLE
from fusionrl.checks.images import check_settings, image_settings
from fusionrl.config.config import Config
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.engines.engine import EngineSpec
from fusionrl.engines.images import CACHE_VARIABLE, ImageSettings, MediaTokens, check_images
from fusionrl.engines.request_routing import RequestMerger
from fusionrl.engines.spec import server_command, server_environment
from fusionrl.models.shape import read_model_shape
from tests.engines.streaming import Engine, serve
from tests.tiny_vision import IMAGE, VIDEO, config_of, image_numbers
from tests.tiny_vision import VISION_START as START

MEDIA = MediaTokens(IMAGE, (IMAGE, VIDEO), START)
ONE = [START, IMAGE, 2]
TRAINED, FROZEN = ImageSettings(True), ImageSettings(False)


@pytest.mark.parametrize(
    ("ids", "images", "error"),
    [
        ([START, IMAGE, 2], None, "1 placeholders of images .* has 0"),
        ([START, IMAGE, IMAGE, IMAGE, IMAGE, 2], ["a"], "4 placeholders of images .* has 1"),  # expanded ones
        ([START, IMAGE, 2], ["a", "b"], "1 placeholders of images .* has 2"),
        ([1, 2], "a", "0 placeholders of images .* has 1"),
        ([[START, IMAGE], [1, 2]], [["a"], ["b"]], "0 placeholders of images .* has 1"),
        ([[START, IMAGE], [START, IMAGE]], ["a"], "1 entries for 2 prompts"),
        ([START, IMAGE, VIDEO], ["a"], f"token {VIDEO}, which engines take for a video"),
        (np.array([START, IMAGE, IMAGE]), ["a"], "2 placeholders of images .* has 1"),
        ([1, IMAGE, 2], ["a"], f"no token {START}, the start of an image, precedes"),
        ([START, IMAGE, 2, START], ["a"], f"end with token {START}, the start of an image"),
    ],
)
def test_requests_whose_images_are_not_its_placeholders(ids: Any, images: Any, error: str) -> None:
    """An engine would hang, answer with another picture, or be asked ten times (SGLang 0.5.23)."""
    payload = {"input_ids": ids, "sampling_params": {}} | ({} if images is None else {"image_data": images})
    with pytest.raises(ValueError, match=error):
        check_images(payload, MEDIA)

    async def ask() -> None:
        async with GenerateClient("http://127.0.0.1:9", media=MEDIA) as client:
            await client.generate(payload)

    with pytest.raises(ValueError, match=error):
        asyncio.run(ask())


def test_requests_whose_images_fit() -> None:
    for ids, images in (
        ([1, 2], None),
        ([START, IMAGE, 2], ["a"]),
        ([START, IMAGE, 2], "a"),
        (np.array([START, IMAGE, 2]), ["a"]),
        ([[START, IMAGE], [1, 2]], [["a"], []]),
        ([[START, IMAGE], [START, IMAGE]], ["a", "b"]),
    ):
        check_images({"input_ids": ids, "image_data": images}, MEDIA)
    check_images({"text": "a question"}, MEDIA)


def test_siblings_are_sent_together_with_an_image_each() -> None:
    sent: list[Any] = []

    async def send(payload: Any, body: bytes | None) -> Any:
        sent.append(payload)
        return [*range(len(payload["input_ids"]))]

    async def ask() -> list[Any]:
        merger = RequestMerger(send)
        payload = {
            "input_ids": [START, IMAGE, 7],
            "image_data": ["a picture"],
            "sampling_params": {"max_new_tokens": 4},
        }
        return await asyncio.gather(*(merger.generate(payload) for _ in range(3)))

    assert asyncio.run(ask()) == [0, 1, 2]
    (request,) = sent
    assert request["input_ids"] == [[START, IMAGE, 7]] * 3
    assert request["image_data"] == [["a picture"]] * 3


@pytest.mark.parametrize(
    "sampled", [[97, 98, 99, 100], [97, IMAGE, 99, 100], [97, VIDEO, 99, 100], [97, 98, START, 99]]
)
def test_what_a_dead_engine_sent_goes_on_elsewhere_with_the_images(sampled: list[int]) -> None:
    """Unless the model has sampled a placeholder: it would be taken for an image's, and the answer ends there."""
    served = Engine(sampled, 3, [("die", 3)])
    payload = {"input_ids": ONE, "image_data": ["a picture"], "sampling_params": {"max_new_tokens": 4}}

    async def use(url: str) -> Generation:
        async with GenerateClient(url, None, 30.0, 4, media=MEDIA, num_tries=4, stream_responses=True) as client:
            return await client.generate(payload)

    answer = serve(served, use)
    assert answer.finish_reason == "length"
    if sampled[1:3] != [98, 99]:
        assert answer.tokens.tolist() == sampled[:3] and len(served.asked) == 1
        assert answer.weight_versions == [(7, 1)] * 3
        np.testing.assert_allclose(answer.log_probs, [served.log_prob(i) for i in range(3)])
    else:
        assert answer.tokens.tolist() == sampled
        assert [request["input_ids"] for request in served.asked] == [
            [START, IMAGE, 2],
            [START, IMAGE, 2, *sampled[:3]],
        ]
        assert all(request["image_data"] == ["a picture"] for request in served.asked)


@pytest.mark.parametrize(
    ("settings", "args", "environment", "error"),
    [
        (TRAINED, {}, {CACHE_VARIABLE: "100"}, "features of images from before a weight push"),
        (FROZEN, {}, {"SGLANG_MM_AVOID_RETOKENIZE": "0"}, "tokenize prompts with images again"),
        (FROZEN, {"language_model_only": True}, {}, "--sglang-language-model-only True: the engines would not see"),
        (FROZEN, {"mm_preprocess_cache_size_mb": 0}, {}, "decoded and cut anew"),
        (FROZEN, {"image_processor_backend": "torchvision"}, {}, "it is for engines on a GPU"),
        (FROZEN, {"mm_process_config": {"image": {"max_pixels": 9}}}, {}, "use --image-min-pixels"),
    ],
)
def test_settings_with_which_an_engine_sees_otherwise_than_trainers(
    settings: ImageSettings, args: dict[str, object], environment: dict[str, str], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        check_settings(settings, "cpu", args, environment=environment)
    check_settings(FROZEN, "cpu", {"mm_attention_backend": "sdpa"}, environment={CACHE_VARIABLE: "100"})


def test_an_engine_has_the_limits_of_all_sets(tmp_path: Path) -> None:
    """And none where the model's own hold."""
    config_of("qwen3_vl").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_numbers("qwen3_vl")))  # 1,024 to 65,536
    shape = read_model_shape(tmp_path, sees=True)
    flags: dict[str, object] = {"hf_checkpoint": str(tmp_path), "multimodal_keys": {"image": "images"}}
    assert image_settings(Config.from_flat(flags), shape) == ImageSettings(True)
    assert image_settings(Config.from_flat(flags | {"mode": "eval"}), shape) == ImageSettings(False)
    assert image_settings(Config.from_flat(flags | {"freeze_vision": True}), shape) == ImageSettings(False)
    sets = {"eval": {"datasets": [{"name": "a", "path": "a.jsonl", "image_max_pixels": 99_999}]}}
    (tmp_path / "sets.yaml").write_text(json.dumps(sets))
    flags |= {"image_max_pixels": 4096, "eval_config": str(tmp_path / "sets.yaml")}
    assert image_settings(Config.from_flat(flags), shape) == ImageSettings(True, 1024, 99_999)
    text = read_model_shape(tmp_path)
    assert image_settings(Config.from_flat({"hf_checkpoint": str(tmp_path)}), text) is None


def test_an_engine_that_sees(tmp_path: Path) -> None:
    """Its flags and variables; one of text has none of them."""
    config = config_of("qwen3_vl")
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    places: dict[str, Any] = {"tp_size": 1, "gpu_ids": (), "host": "127.0.0.1", "api_key": None, "seed": 1}
    spec = EngineSpec(0, str(tmp_path), "cpu", "float32", log_dir="", **places, images=ImageSettings(True, 1024, 65536))
    command, environment = server_command(spec, 1, 2), server_environment(spec)
    assert command[command.index("--mm-process-config") + 1] == '{"image": {"min_pixels": 1024, "max_pixels": 65536}}'
    assert command[command.index("--image-processor-backend") + 1] == "pil"
    assert environment[CACHE_VARIABLE] == "0"
    assert environment[PROCESSOR_VARIABLE] == "qwen_vl"
    plain = EngineSpec(0, str(tmp_path), "cpu", "float32", log_dir="", **places)
    assert not {"--mm-process-config", "--mm-preprocess-cache-size-mb"} & {*server_command(plain, 1, 2)}
    assert CACHE_VARIABLE not in server_environment(plain)
