"""Real engines with a tiny model of each family that sees: their log-probs are transformers'."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.config import Config
from fusionrl.data.image_store import IMAGES, MEGABYTE
from fusionrl.data.images import read_processor_files
from fusionrl.data.sample import Sample
from fusionrl.engines.answers import join
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.engines.engine import EngineActor
from fusionrl.engines.http import call
from fusionrl.engines.images import ImageSettings, MediaTokens
from fusionrl.engines.router import Router
from fusionrl.engines.weight_payload import by_value
from fusionrl.models.families import hf_shapes
from fusionrl.models.hf_io import HFReader
from fusionrl.models.shape import read_model_shape
from fusionrl.rollout.agent import append_messages, end_of_turn
from fusionrl.rollout.image_requests import with_images
from fusionrl.rollout.sglang_rollout import generate_turn, sampling_params
from fusionrl.weights.checksums import CPU_MULTIPLE, engine_checksums
from fusionrl.weights.verify import compare_checksums
from tests.engines.real_engine import KEY, real_engine
from tests.tiny_model import make_byte_tokenizer
from tests.tiny_vision import IMAGE, VIDEO, VISION_START, VISION_TOKENS, Reference, make_tiny_vlm, random_image

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang_router") is None,
        reason="sglang and sglang-router are not installed",
    ),
]
BOUND = 3e-5
MEDIA = MediaTokens(IMAGE, (IMAGE, VIDEO), VISION_START)
TOKENIZER = make_byte_tokenizer(more=VISION_TOKENS)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


HEAD = encode("<|im_start|>user\n<|vision_start|>")
TAIL = encode("<|vision_end|>Which one?<|im_end|>\n<|im_start|>assistant\n")
TOOL = encode("<|im_end|>\n<|im_start|>tool\n<|vision_start|>")
ONE = [*HEAD, IMAGE, *TAIL]
TWO = [*HEAD, IMAGE, *encode("<|vision_end|> and <|vision_start|>"), IMAGE, *TAIL]
PARAMS = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}


def uri(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def request(ids: Sequence[int], images: Sequence[np.ndarray], **params: Any) -> dict[str, Any]:
    data = {"image_data": [uri(image) for image in images]} if images else {}
    return {"input_ids": list(ids), "sampling_params": PARAMS | params, **data}


@dataclass
class Served:
    """Engines with one model behind a router, or one alone, and transformers' model of the same folder."""

    engines: list[EngineActor]
    router: Router | None
    reference: Reference

    @property
    def url(self) -> str:
        return self.router.url if self.router is not None else self.engines[0].url

    def image(self, seed: int, width: int = 4, height: int = 4) -> np.ndarray:
        return random_image(seed, width, height, patch=self.reference.patch)

    def ask(self, *payloads: dict[str, Any], **options: Any) -> list[Generation]:
        """Ask for all at once."""

        async def run() -> list[Generation]:
            async with GenerateClient(self.url, KEY, 120.0, 8, vocab_size=512, media=MEDIA, **options) as client:
                return await asyncio.gather(*(client.generate(payload) for payload in payloads))

        return asyncio.run(run())

    def check(self, ids: Sequence[int], images: Sequence[np.ndarray], answer: Generation) -> list[int]:
        """Compare an answer with transformers, and return the ids of prompt and answer, expanded."""
        prompt = self.reference.expand(ids, images)
        assert answer.prompt_tokens == len(prompt)
        tokens = [*prompt, *answer.tokens.tolist()]
        expected = self.reference.log_probs(tokens, images, len(prompt))
        np.testing.assert_allclose(answer.log_probs, expected, atol=BOUND)
        return tokens

    def answer(self, ids: Sequence[int], *images: np.ndarray, **params: Any) -> Generation:
        (answer,) = self.ask(request(ids, images, **params))
        self.check(ids, images, answer)
        return answer

    def assert_sees(self) -> None:
        """Text, images of several sizes, the same ids with other images, and turns, each also from the cache."""
        first, second, wide = self.image(1), self.image(2), self.image(3, 12, 10)
        self.answer(encode("<|im_start|>user\nHello<|im_end|>\n"))
        number = len(self.reference.expand(ONE, [first]))
        assert self.answer(ONE, first).cached_tokens < number - 1
        assert self.answer(ONE, first).cached_tokens == number - 1
        assert self.answer(ONE, second).cached_tokens <= len(HEAD), "what stands before another image"
        self.answer(ONE, wide)
        self.answer(TWO, first, wide)
        turn = next(turn for _ in range(50) if not MEDIA.bar((turn := self.answer(ONE, second)).tokens))
        ids = [*ONE, *turn.tokens.tolist(), *TOOL, IMAGE, *TAIL]
        assert self.answer(ids, second, wide).cached_tokens >= number, "the first turn"
        self.assert_answers_lists()

    def assert_has_the_folder_s_weights(self) -> None:
        """By the checksums with which pushes are verified."""
        spec = self.engines[0].spec
        folder, is_whole = spec.model_path, bool(spec.server_args.get("mm_enable_dp_encoder"))
        shape = read_model_shape(folder, sees=True)
        reader = HFReader(folder)
        tensors = [(name, reader.get(name, sizes)) for name, sizes in hf_shapes(shape).items()]
        expected = engine_checksums(tensors, shape, spec.tp_size, None, CPU_MULTIPLE, is_whole)
        actual = self.engines[0].weight_checksums()
        assert actual is not None
        for ours, theirs in zip(expected, actual, strict=True):
            assert compare_checksums(ours, theirs) == []

    def assert_answers_lists(self) -> None:
        """Siblings in one request, and others under way with them."""
        images = [self.image(number) for number in (1, 1, 1, 4)]
        answers = self.ask(*(request(ONE, [image]) for image in images), request(TWO, [images[0], images[3]]))
        for image, answer in zip(images, answers, strict=False):
            self.check(ONE, [image], answer)
        self.check(TWO, [images[0], images[3]], answers[4])


@pytest.fixture
def serve(tmp_path: Path, forked_engines: None) -> Iterator[Any]:
    """serve(kind, number, images=…, **settings) -> `Served`; more than one engine are behind a router."""
    engines: list[EngineActor] = []
    router = Router("127.0.0.1", str(tmp_path), api_key=KEY)

    def start(kind: str, number: int = 1, **settings: Any) -> Served:
        model = make_tiny_vlm(tmp_path / kind, kind, tower_ffn=100)  # a width that SGLang pads
        reference = Reference(tmp_path / kind, model)
        engines.extend(real_engine(tmp_path / kind, tmp_path, index=index, **settings) for index in range(number))
        starts = [engine.start for engine in engines] + ([router.start] if number > 1 else [])
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(one) for one in starts]:
                started.result()
        for engine in engines if number > 1 else []:
            router.add_worker(engine.url, KEY)
        return Served(engines, router if number > 1 else None, reference)

    yield start
    for engine in engines:
        engine.shutdown()
    router.shutdown()


def busy_one(engines: Sequence[EngineActor]) -> EngineActor:
    """Return the engine that has a request. Its scheduler says so once it starts."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for engine in engines:
            (load,) = call("GET", f"{engine.url}/v1/loads?include=core", api_key=KEY, timeout_s=10.0)["loads"]
            if load["num_running_reqs"]:
                return engine
    raise AssertionError("no engine has a request")


def test_behind_a_router_and_after_the_death_of_an_engine(serve: Any) -> None:
    """Qwen2.5-VL: whole and streamed answers; the engine that continues gets the images again."""
    served = serve("qwen2_5_vl", 2, images=ImageSettings(True), incremental_streaming_output=True)
    served.assert_has_the_folder_s_weights()
    served.assert_sees()
    wide = served.image(5, 12, 10)
    (streamed,) = served.ask(request(ONE, [wide], temperature=0.0), stream_responses=True)
    (whole,) = served.ask(request(ONE, [wide], temperature=0.0))
    assert streamed.tokens.tolist() == whole.tokens.tolist()

    async def stream() -> list[Generation]:
        pieces = []
        urls = [engine.url for engine in served.engines]
        client = GenerateClient(served.url, KEY, 120.0, 8, vocab_size=512, media=MEDIA, worker_urls=urls)
        # The likeliest tokens, of which none is a placeholder: such a sample ends with its engine.
        payload = request(ONE, [wide], max_new_tokens=1500, temperature=0.0)
        async with client, aclosing(client.stream(payload)) as parts:
            async for part in parts:
                pieces.append(part)
                if len(pieces) == 1:
                    busy_one(served.engines).shutdown()
        return pieces

    answer = join(asyncio.run(stream()))
    assert answer.part == 2 and len(answer.tokens) == 1500
    assert not MEDIA.bar(answer.tokens)
    served.check(ONE, [wide], answer)


def test_prompts_in_chunks_that_end_within_an_image(serve: Any) -> None:
    """Qwen3-VL, also with features of images that are computed for each chunk, and with drafts of n-grams."""
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    served = serve("qwen3_vl", images=ImageSettings(True, 1024, 1 << 20), chunked_prefill_size=16, **drafts)
    served.assert_sees()
    _push(served, 7)
    served.assert_sees()
    _assert_turns_are_the_model_s(served)


def _assert_turns_are_the_model_s(served: Served) -> None:
    """Three turns of a sample, with images that a tool shows between them: one forward pass over all of it agrees."""
    engine, folder = served.engines[0], served.engines[0].spec.model_path
    processor = read_processor_files(folder)
    IMAGES.configure(64 * MEGABYTE, None, processor)
    flags = {"hf_checkpoint": folder, "rollout_max_response_len": 10, "rollout_max_context_len": 600}
    args: Any = Config.from_flat(flags | {"image_transport": "file"}).to_args()
    args.run_dir = engine.spec.log_dir
    from PIL import Image

    shown = [served.image(number, 4 + 2 * number, 6) for number in range(3)]
    refs = [IMAGES.add_picture(Image.fromarray(image), processor.limits) for image in shown]
    whole = with_images(ONE, refs[:1])

    async def turns() -> Sample:
        """All of them, or those up to a placeholder that was sampled."""
        params = sampling_params(args) | {"ignore_eos": True}
        sample = Sample(index=0, prompt="?")
        sample.tokens, sample.image_spans = whole.ids, whole.spans
        async with GenerateClient(engine.url, KEY, 120.0, 8, vocab_size=512, media=MEDIA) as args.generate_client:
            for ref in [*refs[1:], None]:
                if (answer := await generate_turn(args, sample, params)) is None:
                    break
                if ref is not None:
                    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}]
                    assert append_messages(args, sample, params, said, [ref], end_of_turn(answer))
        return sample

    try:
        samples = (asyncio.run(turns()) for _ in range(50))
        sample = next(one for one in samples if np.sum(one.loss_mask) == 30)
    finally:
        IMAGES.configure(64 * MEGABYTE, None)
    mask = np.asarray(sample.loss_mask, bool)
    assert len(sample.image_spans) == 3
    expected = served.reference.log_probs(list(sample.tokens), shown, sample.prompt_length)
    np.testing.assert_allclose(np.asarray(sample.rollout_log_probs)[mask], expected[mask], atol=BOUND)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("qwen2_5_vl", {}), ("qwen3_vl_moe", {}), ("kimi_vl", {}), ("kimi_vl", {"mm_enable_dp_encoder": True})],
)
def test_an_engine_of_two_ranks(serve: Any, kind: str, flags: dict[str, Any]) -> None:
    """Which have a part of the tower each, or all of it; also with experts, which the folder has in two tensors."""
    served = serve(kind, images=ImageSettings(False), tp_size=2, chunked_prefill_size=16, **flags)
    served.assert_has_the_folder_s_weights()
    served.assert_sees()


def test_delta_nets_that_see(serve: Any) -> None:
    """Qwen3.5, of which an engine without images serves the text part alone."""
    served = serve("qwen3_5", images=ImageSettings(True))
    served.assert_has_the_folder_s_weights()
    first, wide = served.image(1), served.image(2, 12, 10)
    for _ in range(2):
        served.answer(encode("<|im_start|>user\nHello<|im_end|>\n"))
        served.answer(ONE, first)
        served.answer(TWO, wide, first)


def test_kimi_vl(serve: Any, tmp_path: Path) -> None:
    """Latent attention and experts; a push has the trainers' names. Without images an engine serves DeepSeek-V3."""
    served = serve("kimi_vl", images=ImageSettings(True), chunked_prefill_size=16)
    served.assert_has_the_folder_s_weights()
    served.assert_sees()
    _push(served, 7)
    served.answer(TWO, served.image(1), served.image(3, 12, 10))
    blind = real_engine(tmp_path / "kimi_vl", tmp_path, index=1)
    try:
        blind.start()
        Served([blind], None, served.reference).answer(TAIL)
    finally:
        blind.shutdown()


def test_kept_features_are_those_of_earlier_weights(serve: Any) -> None:
    """SGLang 0.5.23 keeps a tower's features over an update: fusionrl has it keep none where the tower is trained.

    If this fails, SGLang has mended it.
    """
    served = serve("qwen3_vl", images=ImageSettings(False))
    seen, other = served.image(1), served.image(2)
    served.answer(ONE, seen)
    _push(served, 7)
    served.answer(ONE, other)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        served.answer(ONE, seen)


def _push(served: Served, seed: int) -> None:
    """Push another tower, to the engine and to the reference."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in served.reference.model.named_parameters():
            if tensor.dim() > 1 and re.search(r"\.(visual|vision_tower|mm_projector)\.", name):
                tensor.add_(0.3 * tensor.std() * torch.randn(tensor.shape, generator=random))
    tower = [(name, x) for name, x in served.reference.pushed().items() if name.startswith("visual.")]
    engine = served.engines[0]
    engine.begin_weight_update()
    engine.update_weights_from_tensor([by_value(tower)], load_format=None, version=str(seed), flush_cache=True)
    engine.end_weight_update()
