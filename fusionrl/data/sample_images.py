"""The images of samples: those that data, tools and hooks gave them, and their places among the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fusionrl.data.image_rows import image_file
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, ImageSpan, expanded, pixels_of, span_problem
from fusionrl.data.processor_files import ProcessorFiles
from fusionrl.data.sample import Sample


def set_images(sample: Sample, images: Sequence[ImageRef]) -> None:
    """Give a sample that has no tokens yet its images, in the order of their placeholders."""
    if images:
        from fusionrl.data.stored_image import image_inputs

        sample.multimodal_inputs = image_inputs(images)


def add_images(sample: Sample, spans: Sequence[ImageSpan]) -> None:
    """Note the images among tokens that were appended to a sample."""
    if not spans:
        return
    if (inputs := vars(sample)["multimodal_inputs"]) is not None:  # a hook reads it
        from fusionrl.data.stored_image import StoredImage

        inputs["images"] = [*(inputs.get("images") or ()), *(StoredImage(image) for _, image in spans)]
    sample.image_spans = [*sample.image_spans, *spans]


def expand_prompt(sample: Sample, ids: np.ndarray) -> np.ndarray:
    """Return the ids of the prompt of a sample without tokens, expanded; the sample gets the places of its images.

    Raises:
        ValueError: the ids do not have one placeholder for each image.
    """
    if not vars(sample)["multimodal_inputs"] or sample.image_spans or IMAGES.processor is None:
        return ids
    try:
        whole = expanded(ids, images_of(sample, IMAGES.processor), IMAGES.processor.placeholder)
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from error
    sample.image_spans = whole.spans
    return whole.ids


def images_of(sample: Sample, processor: ProcessorFiles | None = None) -> list[ImageRef]:
    """Return the images of a sample, in order; those that a hook put into `multimodal_inputs` are taken in.

    Raises:
        ValueError: one of the hook's cannot be read, or `processor`, which says what sizes images have, is not given.
    """
    inputs = vars(sample)["multimodal_inputs"]
    values = inputs.get("images") if isinstance(inputs, Mapping) else None
    if not values:
        return [image for _, image in sample.image_spans]
    try:
        return [as_ref(value, processor) for value in values]
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: multimodal_inputs: {error}") from error


def as_ref(value: object, processor: ProcessorFiles | None) -> ImageRef:
    """Return the reference to an image that a hook or a tool gives: of PIL, or as in a row of the data.

    Raises:
        ValueError: it cannot be read, or does not fit.
    """
    from PIL.Image import Image

    from fusionrl.data.stored_image import ref_of

    if isinstance(value, ImageRef):
        return value
    if (ref := ref_of(value)) is not None:
        return ref
    if processor is None:
        raise ValueError("an image in a run without --multimodal-keys")
    if isinstance(value, Image):
        return IMAGES.add_picture(value, processor.limits)
    file = image_file(value, Path())
    image = IMAGES.add_file(file.content, processor.limits, file.source)
    IMAGES.pixels(image)  # an error of the image, not of the request that shows it
    return image


# ------------------------------------------------------------------------------------------------ images of hooks
def adopt_images(sample: Sample, processor: ProcessorFiles) -> None:
    """Find the places of images that a hook added to a sample without noting where, as functions for slime do.

    Its tokens are expanded. The images that have no span yet follow those that have, and each is the next run of
    placeholders, of its length, that is not trained on. Pixels in `multimodal_train_inputs` replace the images'.

    Raises:
        ValueError: an image has no such run.
    """
    fields, tokens = vars(sample), np.asarray(sample.array("tokens"))
    if not len(tokens) or not (fields["multimodal_inputs"] or fields["multimodal_train_inputs"]):
        return
    images = _own_pixels(fields["multimodal_train_inputs"], processor) or images_of(sample, processor)
    trained, spans = sample.array("loss_mask"), list(sample.image_spans)
    if span_problem(tokens, spans, sample.prompt_length, trained):
        spans = []  # the function made other tokens of the prompt
    if len(images) <= len(spans):
        return
    mask = np.zeros(len(tokens), bool)
    mask[sample.prompt_length :] = True if trained is None else trained != 0
    is_placeholder = (tokens == processor.placeholder) & ~mask
    place = spans[-1][0] + spans[-1][1].num_tokens if spans else 0
    for image in images[len(spans) :]:
        count = image.num_tokens
        starts = np.flatnonzero(is_placeholder[place:]) + place
        first = next((int(i) for i in starts if is_placeholder[i : i + count].sum() == count), None)
        if first is None:
            raise ValueError(
                f"sample {sample.index} has {len(images)} images, but its tokens have no {count} placeholders"
                f" ({processor.placeholder}) for image {len(spans) + 1}; add_images(sample, spans) notes where one is"
            )
        spans.append((first, image))
        place = first + count
    sample.image_spans = spans


def _own_pixels(inputs: object, processor: ProcessorFiles) -> list[ImageRef]:
    """Return the images of pixels that a hook made; an empty list for none."""
    if not isinstance(inputs, Mapping) or inputs.get("pixel_values") is None or inputs.get("image_grid_thw") is None:
        return []
    values = np.asarray(inputs["pixel_values"], np.float32)
    grids = np.asarray(inputs["image_grid_thw"]).reshape(-1, 3).tolist()
    ends = np.cumsum([rows * columns for _, rows, columns in grids])
    settings = (processor.limits, processor.mean, processor.std)
    parts = zip(np.split(values, ends[:-1]), grids, strict=True)
    return [IMAGES.add_pixels(pixels_of(part, grid, *settings), processor.limits) for part, grid in parts]
