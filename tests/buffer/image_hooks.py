"""A rollout function whose samples see: the prompt's images, and of some a crop that a tool made."""

from typing import Any

import numpy as np
from PIL import Image

from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import expanded
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import add_images


def answered(sample: Sample) -> Sample:
    assert sample.prompt_tokens is not None
    sample.tokens = sample.prompt_tokens
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], text="an answer", finish_reason="stop")
    if sample.index is not None and sample.index % 4 == 1:
        crop(sample)
        sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text=".", finish_reason="stop")
    sample.reward = float((sample.index or 0) % 2)
    return sample


def crop(sample: Sample) -> None:
    """As a tool's answer: tokens with mask 0, of an image that no file has."""
    processor = IMAGES.processor
    assert processor is not None
    pixels = np.random.default_rng(sample.index).integers(0, 256, (64, 64, 3), np.uint8)
    image = IMAGES.add_picture(Image.fromarray(pixels), processor.limits)
    tokens = expanded([1, processor.placeholder, 2], [image], processor.placeholder, start=sample.num_tokens)
    sample.append_response_tokens(tokens=tokens.ids, trainable=False)
    add_images(sample, tokens.spans)


def sees(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = data_source.get_samples(args.rollout_batch_size)
    return [[answered(sample) for sample in group] for group in groups]


def draws(args: Any, groups: list[list[Sample]]) -> None:
    """A filter that looks at images as it likes."""
    for sample in (sample for group in groups for sample in group if sample.image_spans):
        assert sample.multimodal_inputs is not None
        images = sample.multimodal_inputs["images"]
        images[0].putpixel((0, 0), (1, 2, 3))
        if sample.index and sample.index % 2:
            images[0].thumbnail((8, 8))
            images.append(images[0])
            sample.multimodal_train_inputs = {"pixel_values": ()}


def hands_back(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One group more than is wanted, which comes first in the next rollout with what it has."""
    *groups, last = data_source.get_samples(args.rollout_batch_size + 1)
    groups = [[answered(sample) if not sample.num_tokens else sample for sample in group] for group in groups]
    data_source.add_samples([[answered(sample) for sample in last]])
    return groups
