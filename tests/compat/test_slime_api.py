"""Functions that exist for slime's users alone: what they return."""

import asyncio
import base64
import io
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from fusionrl.compat.slime.api import datasets, http, losses, metrics, misc, rewards, rollouts
from fusionrl.config.config import Config
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageLimits, read_processor_files
from fusionrl.data.sample import Sample
from fusionrl.data.supervised import get_response_lengths
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rewards import text_match
from fusionrl.rollout.types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput


def test_a_singleton_and_its_end() -> None:
    class Service(metaclass=misc.SingletonMeta):
        def __init__(self, name: str = "first") -> None:
            self.name = name

    assert Service() is Service("second") and Service().name == "first"
    kept = Service()
    Service.clear_instances()  # type: ignore[attr-defined]
    assert Service("third") is not kept
    assert misc.Box(3).inner == 3 and len({misc.Box([]), misc.Box([])}) == 2


@pytest.mark.parametrize(
    ("given", "due"), [((1, None), False), ((1, 2), True), ((2, 2), False), ((2, 2, 3), True), ((4, 3, None, 5), True)]
)
def test_what_is_due_after_a_rollout(given: tuple[Any, ...], due: bool) -> None:
    assert misc.should_run_periodic_action(*given) is due


def test_arrays_of_meta_info() -> None:
    text = "AQAAAAIAAAA="  # 1 and 2 as int32
    found = misc.decode_int32_meta_array({"b": text}, ("a", "b"))
    assert found is not None and found.tolist() == [1, 2] and found.dtype == torch.int32
    assert misc.decode_int32_meta_array({}, "a") is None
    assert misc.decode_int32_meta_array({"a": [3]}, "a").tolist() == [3]  # type: ignore[union-attr]


def test_helpers() -> None:
    assert misc.group_by([1, 2, 3], key=lambda x: x % 2) == {1: [1, 3], 0: [2]}
    assert misc.exec_command("echo hi", capture_output=True) == "hi\n"
    assert get_response_lengths([[0, 1, 0], [0, 0], [1]]) == [2, 0, 1]
    assert http.is_port_available(http.get_free_port(20000)) and http.find_available_port(20000) > 1023
    with metrics.trace_span(Sample(), "name", attrs={"a": 1}) as span:
        span.update({"b": 2})
    assert span.end_attrs == {"a": 1, "b": 2}
    args = Namespace(sglang_router_ip="h", sglang_router_port=3)
    assert rollouts.get_model_url(args, "actor") == "http://h:3/generate"


def test_rewards() -> None:
    assert text_match.f1_score("The cat sat.", "a cat") == (pytest.approx(2 / 3), 0.5, 1.0)
    assert text_match.f1_score("yes, it is", "yes") == (0.0, 0.0, 0.0), "a closed answer counts as a whole"
    assert text_match.f1_score(None, "x") == (0.0, 0.0, 0.0)
    assert rewards.last_boxed_only_string(r"a \boxed{1} b \boxed{\frac{1}{2}} c") == r"\boxed{\frac{1}{2}}"
    assert rewards.last_boxed_only_string(r"\boxed{1") is None and rewards.last_boxed_only_string("1") is None
    assert rewards.remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}" and rewards.remove_boxed("1") is None


def test_filters_and_outputs() -> None:
    assert rollouts.call_dynamic_filter(None, 1).keep and not rollouts.call_dynamic_filter(lambda _: False, 1).keep
    dropped = DynamicFilterOutput(False, "same", keep_when_insufficient=True)
    drop = rollouts.should_drop_dynamic_filter_output
    assert drop(dropped, remaining_batch_size=3, target_data_size=2)
    assert not drop(dropped, remaining_batch_size=2, target_data_size=2)
    gatherer = rollouts.MetricGatherer()
    for reason in ("same", "same", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_same": 2}
    train = rollouts.call_rollout_fn(lambda evaluation: [[Sample()]], evaluation=False)
    assert isinstance(train, RolloutFnTrainOutput) and len(train.samples) == 1
    assert isinstance(rollouts.call_rollout_fn(lambda evaluation: {}, evaluation=True), RolloutFnEvalOutput)


def test_metrics() -> None:
    assert metrics.compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    rate = metrics.compute_pass_rate([1, 0, 0, 0, 1, 1, 1, 1], 4)
    assert rate == {"pass@1": pytest.approx(0.625), "pass@2": pytest.approx(0.75), "pass@4": 1.0}
    assert metrics.has_repetition("abc" * 4000) and not metrics.has_repetition("abc")
    with metrics.timer("block"):  # type: ignore[union-attr]
        pass
    assert "block" in metrics.Timer().log_dict()


def test_losses_against_formulas() -> None:
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert torch.allclose(losses.compute_approx_kl(new, old, "k1"), new - old)
    assert torch.allclose(losses.compute_approx_kl(new, old, "k3"), (old - new).exp() - 1 - (old - new))
    bounded = losses.compute_approx_kl(new, old, "low_var_kl", importance_ratio=torch.tensor([1e6, 1.0]))
    assert bounded[0] == 10.0
    with pytest.raises(ValueError, match="kl_loss_type='k9'"):
        losses.compute_approx_kl(new, old, "k9")
    advantages = torch.tensor([1.0, -1.0])
    loss, clipped = losses.compute_policy_loss(old - new, advantages, 0.2, 0.3)
    ratio = (new - old).exp()
    assert torch.allclose(loss, torch.stack([-ratio[0].clamp(max=1.3), ratio[1].clamp(min=0.8)]))
    assert clipped.tolist() == [1.0, 1.0]
    loss, _ = losses.compute_policy_loss(torch.tensor([-3.0]), torch.tensor([-1.0]), 0.2, 0.3, eps_clip_c=3.0)
    assert loss.tolist() == [3.0]


def test_a_teacher_behind_an_address() -> None:
    async def read(request: web.Request) -> web.Response:
        asked = await request.json()
        entries = [[None if i == 0 else -0.5 * i, token, None] for i, token in enumerate(asked["input_ids"])]
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})

    app = web.Application()
    app.router.add_post("/generate", read)
    handle = http.run_app_in_thread(app, host="127.0.0.1")
    url = f"http://127.0.0.1:{handle.port}/generate"
    sample = Sample(tokens=[5, 6, 7, 8], response_length=2)
    sample.reward = asyncio.run(rewards.reward_func(Namespace(rm_url=url, rollout_temperature=1.0), sample))
    assert rewards.post_process_rewards(Namespace(), [sample]) == ([0.0], [0.0])
    assert sample.teacher_log_probs is not None and list(sample.teacher_log_probs) == [-1.0, -1.5]
    with pytest.raises(aiohttp.ClientResponseError):
        asyncio.run(http.get(url))  # it answers to POST alone
    handle.stop()
    assert not handle.thread.is_alive()


def test_the_prompts_of_a_file_are_samples_shuffled_for_each_epoch(
    tokenizer: Any, write_rows: Callable[..., Path]
) -> None:
    rows = [{"text": "x" * n, "answer": str(n), "metadata": {"n": n}} for n in range(1, 9)]
    path = str(write_rows(rows))
    assert list(datasets.read_file(path)) == rows and len(list(datasets.read_file(f"{path}@[2:4]"))) == 2
    data = datasets.Dataset(path, tokenizer, None, 6, label_key="answer", seed=3)
    assert len(data) == 6 and [data[i].label for i in range(6)] == ["1", "2", "3", "4", "5", "6"]
    assert data[0].metadata == {"n": 1} and data[0].prompt == "x"
    data.shuffle(0)
    first = [sample.label for sample in data.samples]
    data.shuffle(0)
    assert [sample.label for sample in data.samples] == first and sorted(first) == ["1", "2", "3", "4", "5", "6"]
    data.shuffle(1)
    assert [sample.label for sample in data.samples] != first
    chat = datasets.Dataset(path, tokenizer, None, None, apply_chat_template=True)
    assert chat[0].prompt.startswith("<|im_start|>user\nx<|im_end|>")
    with pytest.raises(ValueError, match="video: only images are trained on"):
        datasets.Dataset(path, tokenizer, None, None, multimodal_keys={"video": "v"})


def test_the_hooks_of_samples_are_called_on_nested_lists(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "hook.py"
    file.write_text("def note(args, sample, *, rollout_id, evaluation): sample.metadata['seen'] = evaluation\n")
    values: dict[str, Any] = {"hf_checkpoint": str(tiny_model), "rollout_sample_hook_path": [f"{file}:note"]}
    args: Namespace = Config.from_flat(values).to_args()
    samples = [[Sample(response="a", response_length=0)], Sample(response="b")]
    (inner,), outer = asyncio.run(rollouts.apply_rollout_sample_hooks(args, samples, evaluation=True))
    assert inner.metadata == outer.metadata == {"seen": True}


def test_an_engine_is_aborted_until_it_has_no_request() -> None:
    aborts: list[object] = []

    async def abort(request: web.Request) -> web.Response:
        aborts.append(await request.json())
        return web.json_response({})

    async def loads(request: web.Request) -> web.Response:
        load = {"num_running_reqs": int(len(aborts) < 3), "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    app = web.Application()
    app.add_routes([web.post("/abort_request", abort), web.get("/v1/loads", loads)])
    handle = http.run_app_in_thread(app, host="127.0.0.1")
    url = f"http://127.0.0.1:{handle.port}"
    asyncio.run(http.abort_server_until_idle(url, 0.01))
    assert aborts == [{"abort_all": True}] * 3
    asyncio.run(http.abort_servers_until_idle([url, url]))
    handle.stop()
    assert len(aborts) == 5


def test_the_processor_of_a_model_that_sees(tmp_path: Path) -> None:
    """`slime.utils.processing_utils`, without torchvision: ids and pixels are those of transformers' own."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.tiny_vision import IMAGE, make_processor

    make_processor(tmp_path, "qwen2_5_vl")
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE}))
    processor = datasets.load_processor(str(tmp_path), trust_remote_code=True)
    assert processor is not None and processor.image_processor.patch_size == 14
    pictures = [Image.fromarray(np.full((56, side, 3), side, np.uint8)) for side in (28, 84)]
    messages = [{"role": "user", "content": [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "?"}]}]
    inputs = datasets.process_vision_info(messages, processor)
    assert inputs["videos"] is None and np.array_equal(np.asarray(inputs["images"][0]), np.asarray(pictures[0]))
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    for given in (inputs, {"images": pictures[:1]}):
        output = processor(text=text, **datasets.build_processor_kwargs(given))
        assert list(output) == ["input_ids", "attention_mask", "pixel_values", "image_grid_thw"]
        wanted = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=pictures[:1], return_tensors="pt")
        assert output.image_grid_thw.tolist() == wanted["image_grid_thw"].tolist() == [[1, 4, 2]]
        assert (output.pixel_values - wanted["pixel_values"]).abs().max() <= 1e-6
        assert output["input_ids"][0].count(IMAGE) == 2
    two = processor(["<|image_pad|>", "a<|image_pad|>"], images=pictures)
    assert [ids.count(IMAGE) for ids in two.input_ids] == [2, 6]
    assert set(processor("text alone")) == {"input_ids", "attention_mask"}
    # A data set has the run's limits of pixels.
    content = io.BytesIO()
    Image.fromarray(np.zeros((224, 224, 3), np.uint8)).save(content, "PNG")
    (tmp_path / "a.png").write_bytes(content.getvalue())
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "<image>", "images": ["a.png"]}))
    options: dict[str, Any] = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    IMAGES.configure(1 << 20, None, read_processor_files(tmp_path).limited(None, 56 * 56))
    try:
        (row,) = datasets.Dataset(str(rows), load_tokenizer(str(tmp_path)), None, None, **options).samples
        assert [image.num_tokens for _, image in row.image_spans] == [4]
        assert IMAGES.processor is not None
        kimi = replace(IMAGES.processor, limits=ImageLimits(14, 2, 1, 56 * 56, pads=True))
        limits = datasets._limits_of(kimi)
        assert kimi.limited(limits.get("image_min_pixels"), limits["image_max_pixels"]) == kimi
    finally:
        IMAGES.__init__()  # type: ignore[misc]
    with pytest.raises(ValueError, match="1 placeholders of images in the tokens, but 0 images"):
        processor("<|image_pad|>")
    uri = datasets.encode_image_for_rollout_engine(pictures[1])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))), pictures[1])
