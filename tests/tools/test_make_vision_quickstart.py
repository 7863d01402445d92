"""The task `zoom` of the vision quickstart: what the model can see, and conversations as the agent makes them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fusionrl.buffer.data_source import RolloutDataSource
from fusionrl.data.image_store import IMAGES, MEGABYTE
from fusionrl.data.images import read_processor_files, resized
from fusionrl.rollout.agent import generate
from fusionrl.rollout.sft_rollout import generate_rollout
from fusionrl.rollout.sglang_rollout import sampling_params
from tests.rollout import engine as scripted
from tests.rollout.engine import needs
from tools.make_vision_quickstart import BOXES, CALL, draw_patterns, write_model, zoom_rows


def test_patterns_are_grey_until_the_model_zooms_in() -> None:
    pictures = [Image.fromarray(draw_patterns(1, [number] * 4, random.Random(0))) for number in (1, 2, 3, 4)]
    whole = [resized(picture.convert("RGB"), 64, 64).astype(int) for picture in pictures]
    parts = [resized(picture.crop((256, 0, 512, 256)).convert("RGB"), 64, 64).astype(int) for picture in pictures]
    assert all(np.abs(one - whole[0]).max() <= 1 for one in whole)
    assert all(np.abs(one - two).mean() > 15 for i, one in enumerate(parts) for two in parts[:i])
    assert whole[0][:32, 32:].mean() > whole[0][:32, :32].mean() + 30, "the light quarter"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    write_model(tmp_path / "model", 0, (*CALL, *BOXES))
    IMAGES.configure(64 * MEGABYTE, None, read_processor_files(tmp_path / "model").limited(None, 4096))
    yield str(tmp_path / "model")
    IMAGES.configure(64 * MEGABYTE, None)


@needs("sglang")
def test_conversations_are_those_of_the_agent(folder: str, tmp_path: Path) -> None:
    """The same tokens, images and masks: what supervised training teaches is what the agent continues from."""
    rows, file = zoom_rows(1, random.Random(0), True), tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    said = [message["content"] for message in rows[0]["messages"] if message["role"] == "assistant"]
    flags: dict[str, Any] = {"prompt_data": str(file), "multimodal_keys": {"image": "images"}, "tool_key": "tools"}
    flags |= {"image_max_pixels": 4096, "rollout_batch_size": 1}
    args, _ = scripted.prepare(folder, [], mode="sft", input_key="messages", **flags)
    ((taught,),) = generate_rollout(args, 0, RolloutDataSource(args)).samples
    rows[0]["images"].pop()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    flags |= {"input_key": "problem", "apply_chat_template": True, "image_transport": "data"}
    flags |= {"tools_path": "fusionrl.rollout.zoom.tools", "tool_call_parser": "qwen25"}
    args, engine = scripted.prepare(folder, said, **flags)
    engine.image_unit = 32
    ((sample,),) = RolloutDataSource(args).get_samples(1)
    engine.serve(args, lambda: generate(args, sample, sampling_params(args)))
    assert [*sample.tokens] == [*taught.tokens] and [*sample.loss_mask] == [*taught.loss_mask]
    for (place, image), (other_place, other) in zip(sample.image_spans, taught.image_spans, strict=True):
        assert place == other_place
        np.testing.assert_array_equal(IMAGES.pixels(image), IMAGES.pixels(other))
