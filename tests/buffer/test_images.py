"""Images in the Buffer: each is there once, goes to the trainers once, and comes back from checkpoints."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from fusionrl import cli
from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.buffer.sample_files import write_pictures
from fusionrl.buffer.stream import Stream
from fusionrl.config.config import Config
from fusionrl.config.eval_sets import eval_sets
from fusionrl.data.columns import PromptColumns
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import normal_form, read_processor_files
from fusionrl.data.prompts import load_conversations
from fusionrl.data.sample import Sample
from fusionrl.data.sample_json import pack_sample, read_samples
from fusionrl.models.shape import read_model_shape
from fusionrl.observe.rollouts import RolloutWriter
from fusionrl.pipeline.knobs import Knobs
from fusionrl.plan.plan import make_plan
from fusionrl.rollout import sglang_rollout
from tests.tiny_vision import config_of, make_processor

ROOT = Path(__file__).parents[2]
HOOKS = Path(__file__).with_name("image_hooks.py")
KEYS = {"image": "images"}
run = asyncio.run


def png(seed: int, side: int = 64) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, without its weights: the Buffer reads the rest alone."""
    folder = tmp_path_factory.mktemp("model")
    make_processor(folder, "qwen3_vl")
    config_of("qwen3_vl").save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """12 prompts: every third is text alone, and two show the same image."""
    rows = []
    for number in range(12):
        row: dict[str, Any] = {"input": f"{number}?", "label": "x"}
        if number % 3:
            (tmp_path / f"{number}.png").write_bytes(png(1 if number == 4 else number))
            row |= {"input": f"<image>{number}?", "images": [f"{number}.png"]}
        rows.append(row)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def buffer(model: Path, data: Path, tmp_path: Path) -> Callable[..., BufferActor]:
    """buffer(flag=value, …) -> a Buffer in whose process no image is yet; 4 prompts x 8 samples, 2 ranks."""

    def make(attempt: int = 1, name: str = "run", **changes: Any) -> BufferActor:
        gc.collect()
        IMAGES.__init__()  # type: ignore[misc]
        values = {
            "hf_checkpoint": str(model),
            "prompt_data": str(data),
            "label_key": "label",
            "multimodal_keys": KEYS,
            "apply_chat_template": True,
            "rollout_function_path": f"{HOOKS}:sees",
            "custom_rm_path": f"{HOOKS}:sees",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 8,
            "rollout_max_response_len": 16,
            "num_rollout": 30,
            "actor_num_gpus_per_node": 2,
        }
        config = Config.from_flat(values | changes)
        plan = make_plan(config, read_model_shape(model), device="cpu", num_prompts=12)
        made = BufferActor(config, plan, str(tmp_path / name), attempt, put=lambda shard: shard)
        run(made.setup(EngineEndpoints()))
        return made

    return make


@pytest.fixture(autouse=True)
def _no_images_later() -> Iterator[None]:
    yield
    IMAGES.__init__()  # type: ignore[misc]


def test_each_image_goes_to_a_rank_once(buffer: Callable[..., BufferActor], model: Path) -> None:
    """Rules R9 and R18; acceptance point A16."""
    made, limits = buffer(), read_processor_files(model).limits
    shards = run(made.generate(0)).shards
    keys = set()
    for shard in shards:
        assert len(shard.spans) == shard.num_samples
        assert sum(image.nbytes for image in shard.images.values()) == len(shard.images) * 64 * 64 * 3
        for index, spans, tokens in zip(
            shard.fields["sample_index"].tolist(), shard.spans, shard.split("tokens"), strict=True
        ):
            prompt = index // 8
            assert len(spans) == int(prompt % 3 > 0) + int(index % 4 == 1)
            for first, _, grid in spans:
                assert grid == (1, 4, 4) and set(tokens[first : first + 4]) == {IMAGES.processor.placeholder}  # type: ignore[union-attr]
            if prompt % 3:
                assert np.array_equal(shard.images[spans[0][1]], normal_form(png(prompt), limits))
        keys |= shard.images.keys()
    assert len(keys) == 2 + 8  # of two prompts, and one for each crop
    for sample in read_samples(next((made.run_dir / "rollouts").glob("*.jsonl"))):
        sample.validate()
        assert sample.index is not None
        assert len(sample.image_spans) == int(sample.index // 8 % 3 > 0) + int(sample.index % 4 == 1)
    assert IMAGES.num_bytes <= 10 * 64 * 64 * 3  # 32 samples hold references


def test_filters_change_no_image(buffer: Callable[..., BufferActor]) -> None:
    wanted = run(buffer().generate(0)).shards
    found = run(buffer(name="filtered", rollout_sample_filter_path=f"{HOOKS}:draws").generate(0)).shards
    for want, shard in zip(wanted, found, strict=True):
        assert shard.spans == want.spans
        np.testing.assert_equal(shard.images, want.images)


def test_memory_does_not_grow(buffer: Callable[..., BufferActor]) -> None:
    """Acceptance point A16: what tools made goes with the samples, also where the cache holds two images alone."""
    made = buffer(image_cache_mb=1)
    IMAGES._max_bytes, sizes = 2 * 64 * 64 * 3, []
    gc.freeze()  # what other tests have left is not looked at again and again
    for number in range(9):
        rollout = run(made.generate(number))
        assert IMAGES.num_bytes <= 2 * 64 * 64 * 3
        del rollout
        gc.collect()
        scratch = IMAGES._scratch
        assert scratch is not None
        sizes.append((len(IMAGES._living), scratch.num_bytes))
    gc.unfreeze()
    for numbers in zip(*sizes, strict=True):
        assert max(numbers[3:]) <= max(numbers[:3])


def test_a_resume_has_the_images(buffer: Callable[..., BufferActor], data: Path) -> None:
    """The samples of a group that was handed back, with a crop that no file has; the data set's images have gone, and
    the checkpoint goes when newer ones are there."""
    named = {"rollout_function_path": f"{HOOKS}:hands_back"}
    made = buffer(**named)
    run(made.generate(0))
    path = made.run_dir / "step" / "buffer.json"
    path.parent.mkdir()
    run(made.save(str(path), 0))
    saved = {file.stem for file in (path.parent / "images").iterdir()}
    assert len(saved) == 1 + 2  # of the fifth prompt, and of two of its samples
    wanted = run(made.generate(1))
    hashes, pixels = run(made.state_hash(0)), {k: v for shard in wanted.shards for k, v in shard.images.items()}
    del made, wanted
    resumed = buffer(attempt=2, **named)
    for name in ("1.png", "4.png"):  # the same image
        (data.parent / name).unlink()
    assert run(resumed.load(str(path))) == 0 and run(resumed.state_hash(0)) == hashes
    kept = shutil.move(path.parent, data.parent / "kept")
    again = run(resumed.generate(1))
    found = {k: v for shard in again.shards for k, v in shard.images.items()}
    assert found.keys() == pixels.keys() and saved <= found.keys()
    assert all(np.array_equal(found[key], pixels[key]) for key in found)
    for name, seed in (("4.png", 1), ("1.png", 99)):
        (data.parent / name).write_bytes(png(seed))
    with pytest.raises(ValueError, match="its 12 prompts are not the 12 of the checkpoint"):
        run(buffer(attempt=3, **named).load(str(kept / "buffer.json")))


def test_a_small_cache_decodes_an_image_once_a_shard(
    buffer: Callable[..., BufferActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, decoded = buffer(), list[str]()
    IMAGES._max_bytes = 0
    monkeypatch.setattr(RolloutWriter, "add_picture", lambda *given: 0)
    monkeypatch.setattr(
        IMAGES, "original", lambda image, usual=IMAGES.original: decoded.append(image.key) or usual(image)
    )
    shards = run(made.generate(0)).shards
    assert sorted(decoded) == sorted(key for shard in shards for key in shard.images)


def test_images_of_a_stream_s_state_are_held_from_the_look_on(
    buffer: Callable[..., BufferActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that ends between the look at the state and its keeping is in the checkpoint, with its images."""
    made = buffer()
    assert IMAGES.processor is not None
    held = [Sample(image_spans=[(0, IMAGES.add_file(png(50), IMAGES.processor.limits))])]
    source = Mock(state_at=lambda rollout_id: {"buffer": [[pack_sample(sample) for sample in held]]})
    stream = Stream(Knobs(groups_per_fetch=1), Mock(), source)

    def look_and_end(look: Callable[[], Any]) -> Any:
        seen = look()
        held.clear()
        gc.collect()
        IMAGES._sweep()
        return seen

    monkeypatch.setattr(stream, "_read", look_and_end)
    made.source.keep_with(0, *stream.snapshot(-1))
    run(made.save(str(made.run_dir / "buffer.json"), 0))
    (saved,) = (made.run_dir / "images").iterdir()
    assert np.array_equal(np.asarray(Image.open(saved)), normal_form(png(50), IMAGES.processor.limits))


def test_samples_in_files_and_on_pages(buffer: Callable[..., BufferActor], capsys: pytest.CaptureFixture[str]) -> None:
    """Feature F8."""
    made = buffer()
    run(made.generate(0))
    pictures = made.run_dir / "rollouts" / "images"
    assert len(list(pictures.iterdir())) == 10
    samples = read_samples(next(pictures.parent.glob("*.jsonl")))
    samples = [sample for sample in samples if all(image.source for _, image in sample.image_spans)]
    writer = RolloutWriter(made.run_dir / "again")
    written = [write_pictures(writer, samples) for _ in range(2)]  # in mode sft, their bytes are limited, too
    files = list((writer.folder / "images").iterdir())
    assert files and written == [sum(path.stat().st_size for path in files), 0]
    cli.main(["show", str(made.run_dir), "--sample", "9"])
    text = capsys.readouterr().out
    assert text.count("64 x 64  ") == 2 and str(next(pictures.iterdir()).parent) in text
    cli.main(["view", str(made.run_dir), "--html", str(made.run_dir / "page.html")])
    page = (made.run_dir / "page.html").read_text()
    assert "img-src data:" in page
    packed = re.search(r'id="run0-0">([^<]*)<', page)
    assert packed is not None
    block = json.loads(zlib.decompress(base64.b64decode(packed[1]), -15))
    assert len(block["images"]) == 10 and len(block["rows"]["9"]["images"]) == 2
    for key, uri in block["images"].items():
        assert base64.b64decode(uri.removeprefix("data:image/jpeg;base64,")) == (pictures / f"{key}.jpg").read_bytes()


def test_saved_rollouts_are_trained_on_again(buffer: Callable[..., BufferActor], tmp_path: Path) -> None:
    template = str(tmp_path / "saved" / "{rollout_id}.jsonl")
    made = buffer(save_debug_rollout_data=template)
    wanted = run(made.generate(0)).shards
    del made
    (tmp_path / "1.png").unlink()
    replay = buffer(name="replay", debug_train_only=True, load_debug_rollout_data=template)
    for want, found in zip(wanted, run(replay.generate(0)).shards, strict=True):
        assert found.spans == want.spans
        np.testing.assert_equal(found.images, want.images)


def test_accepted_samples_are_what_sft_reads(buffer: Callable[..., BufferActor], model: Path) -> None:
    made = buffer(mode="reject-sampling", no_trainer=True, reject_sampling_threshold=1.0, reject_sampling_per_prompt=8)
    run(made.generate(0))
    args = Config.from_flat(
        {"hf_checkpoint": str(model), "multimodal_keys": KEYS, "mode": "sft", "input_key": "messages"}
    ).to_args()
    rows = [json.loads(line) for line in (made.run_dir / "accepted.jsonl").read_text().splitlines()]
    # Answers to different images under one text are different answers; crops are part of them.
    assert {len(row.get("images", ())) for row in rows} == {0, 1, 2}
    loaded = load_conversations(made.run_dir / "accepted.jsonl", PromptColumns.of(args, False)).samples
    for row, sample in zip(rows, loaded, strict=True):
        sample.validate()
        num_images = len(row.get("images", ()))
        if "tokens" in row:
            assert len(sample.image_spans) == num_images
            assert sample.num_tokens == len(row["tokens"]) + 3 * num_images


def test_an_evaluation_set_has_its_own_keys_and_limits(model: Path, data: Path, tmp_path: Path) -> None:
    """Acceptance point A13."""
    (tmp_path / "eval.yaml").write_text(
        json.dumps(
            {
                "eval": {
                    "datasets": [
                        {"name": "as-trained", "path": str(data), "rm_type": "exact"},
                        {"name": "small", "path": str(data), "image_max_pixels": 32 * 32, "rm_type": "exact"},
                        {"name": "own", "path": str(data), "multimodal_keys": {"image": "seen"}, "rm_type": "exact"},
                    ]
                }
            }
        )
    )
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row | {"seen": row.get("images")}) + "\n" for row in rows))
    config = Config.from_flat(
        {
            "hf_checkpoint": str(model),
            "multimodal_keys": KEYS,
            "apply_chat_template": True,
            "eval_config": str(tmp_path / "eval.yaml"),
            "rollout_max_response_len": 4,
        }
    )
    args = config.to_args()
    trained, small, own = (sglang_rollout._prompts_of(args, each, "--eval-config") for each in eval_sets(args))
    sizes = [[image.num_tokens for sample in of for _, image in sample.image_spans] for of in (trained, small, own)]
    assert sizes == [[4] * 8, [1] * 8, [4] * 8]


def test_runs_of_text_import_nothing_of_images() -> None:
    """The Buffer and the trainers of a run without images pay nothing for them."""
    code = "import sys, fusionrl.buffer.actor, fusionrl.trainer.policy; print({'PIL', 'av', 'cv2'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
