"""The images of samples: those that data, tools and hooks gave them, and their places among the tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fusionrl.data.image_store import IMAGES, Loan
from fusionrl.data.images import ImageRef, ImageSpan, ProcessorFiles, expanded, span_problem
from fusionrl.data.sample import Sample


def set_images(sample: Sample, images: Sequence[ImageRef]) -> None:
    """Give a sample that has no tokens yet its images, in the order of their placeholders."""
    if images:
        from fusionrl.data.processor import image_inputs

        sample.multimodal_inputs = image_inputs(images)


def add_images(sample: Sample, spans: Sequence[ImageSpan]) -> None:
    """Note the images among tokens that were appended to a sample."""
    if not spans:
        return
    if (inputs := vars(sample)["multimodal_inputs"]) is not None:  # a hook reads it
        from fusionrl.data.processor import StoredImage

        inputs["images"] = [*(inputs.get("images") or ()), *(StoredImage(image) for _, image in spans)]
    sample.image_spans = [*sample.image_spans, *spans]


def prompt_of(sample: Sample) -> Sample:
    """Return a sample of the same prompt, with its row's fields and its group, and without index, answer and reward."""
    new = Sample(
        group_index=sample.group_index,
        prompt=copy.deepcopy(sample.prompt),
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        messages=copy.deepcopy(sample.messages),
        adapter=sample.adapter,
    )
    vars(new).update(prompt_images(sample))
    return new


def prompt_images(sample: Sample) -> dict[str, object]:
    """Return the fields of images, and `prompt_tokens`, of a sample of the same prompt that has no tokens yet.

    Places are those in `prompt_tokens`; without these, the images are in `multimodal_inputs` until there are tokens.
    """
    ids, spans = sample.prompt_tokens, list(sample.image_spans)
    if not spans:
        return {"prompt_tokens": ids, "multimodal_inputs": copy.deepcopy(vars(sample)["multimodal_inputs"])}
    if sample.num_tokens:
        spans = [span for span in spans if span[0] < sample.prompt_length]
    if ids is not None and span_problem(ids, spans, len(ids), None) is None:
        return {"prompt_tokens": ids, "image_spans": spans, "multimodal_inputs": None}
    from fusionrl.data.processor import image_inputs

    inputs = image_inputs([image for _, image in spans]) if spans else None
    return {"prompt_tokens": None, "image_spans": (), "multimodal_inputs": inputs}


def expand_prompt(sample: Sample, ids: np.ndarray) -> np.ndarray:
    """Return the ids of the prompt of a sample without tokens, expanded; the sample gets the places of its images.

    Raises ValueError: the ids do not have one placeholder for each image.
    """
    vars(sample).update(prompt_images(sample))
    if not vars(sample)["multimodal_inputs"] or IMAGES.processor is None:
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
    if not (values := _given(sample)):
        return [image for _, image in sample.image_spans]
    try:
        from fusionrl.data.processor import as_ref

        return [as_ref(value, processor) for value in values]
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: multimodal_inputs: {error}") from error


def loan_of(samples: Iterable[Sample]) -> Loan | None:
    """Return what another process needs to read the images of samples; None in a run of text."""
    if IMAGES.processor is None:
        return None
    refs = {image.key: image for sample in samples for _, image in sample.image_spans}
    refs |= {ref.key: ref for sample in samples for value in _given(sample) if (ref := getattr(value, "ref", None))}
    return IMAGES.lend(refs.values())


def _given(sample: Sample) -> list[object]:
    """Return the images in `multimodal_inputs`, where a hook or the row has put some."""
    inputs = vars(sample)["multimodal_inputs"]
    return list(inputs.get("images") or ()) if isinstance(inputs, Mapping) else []


# ------------------------------------------------------------------------------------------------ images of hooks
def keep_images(samples: Iterable[Sample]) -> None:
    """Undo what a reward or a filter did to the images of samples whose places are known."""
    for sample in samples:
        if sample.image_spans:
            restore_images(sample)


def restore_images(sample: Sample) -> None:
    """Undo what a function did to the images of a sample that was generated: engines have seen those of its spans."""
    fields = vars(sample)
    if not sample.num_tokens:
        return
    if isinstance(inputs := fields["multimodal_inputs"], Mapping):
        own = {name: value for name, value in inputs.items() if name not in ("images", "videos")}
        fields["multimodal_inputs"] = None
        if own:
            fields["multimodal_inputs"] = {**(sample.multimodal_inputs or {}), **own}
    fields["multimodal_train_inputs"] = None


def adopt_images(sample: Sample, processor: ProcessorFiles) -> None:
    """Find the places of images that a hook gave to a sample without noting where, as functions for slime do.

    Its tokens are expanded. An image that a hook has put in another's stead takes its place, where both have as many
    tokens. The images that have no place follow those that have, and each is the next run of placeholders, of its
    length, that is not trained on. Without a place of its own, an image that came with the row was not shown.

    Raises ValueError: an image has no such run, or came in another's stead after `generate_turn` had sent that one; or
    `multimodal_train_inputs` has other pixels than the images.
    """
    fields = vars(sample)
    values, pixels = _given(sample), fields["multimodal_train_inputs"]
    if not values and pixels is None:
        return
    images = images_of(sample, processor)
    if sample.num_tokens:
        from fusionrl.data.processor import StoredImage

        of_hooks = [v for v in values if not isinstance(v, StoredImage) or v.is_new or v.is_changed]
        sample.image_spans = _placed(sample, images, bool(of_hooks), processor)
        images = [image for _, image in sample.image_spans]
        _check_pixels(sample, pixels, images, processor)
    if values:
        from fusionrl.data.processor import image_inputs

        fields["multimodal_inputs"] = image_inputs(images) | {
            name: value for name, value in fields["multimodal_inputs"].items() if name != "images"
        }
    fields["multimodal_train_inputs"] = None


def _placed(sample: Sample, images: Sequence[ImageRef], has_own: bool, processor: ProcessorFiles) -> list[ImageSpan]:
    """Return the spans of a sample with these images, of which a hook has given some where `has_own`."""
    tokens, trained, spans = np.asarray(sample.array("tokens")), sample.array("loss_mask"), list(sample.image_spans)
    if span_problem(tokens, spans, sample.prompt_length, trained):
        spans = []  # the function made other tokens of the prompt
    is_free = tokens == processor.placeholder
    is_free[sample.prompt_length :] &= False if trained is None else trained == 0
    for start, image in spans:
        is_free[start : start + image.num_tokens] = False
    runs = np.flatnonzero(np.diff(is_free, prepend=False, append=False)).reshape(-1, 2).tolist()
    if spans and not has_own and (not runs or len(images) <= len(spans)):
        return spans
    name = f"sample {sample.index} has {len(images)} images in multimodal_inputs, but"
    if len(images) < len(spans):
        raise ValueError(f"{name} {len(spans)} among its tokens")
    for number, ((start, held), image) in enumerate(zip(spans, images, strict=False)):
        if image != held and sample.response_length and sample.temperature is not None:  # as `generate_turn` notes it
            raise ValueError(f"{name} image {number + 1} is not the one that the engine saw; change it before the turn")
        if image.num_tokens != held.num_tokens:
            counts = f"{held.num_tokens} placeholders for image {number + 1}, which has {image.num_tokens} tokens"
            raise ValueError(f"{name} {counts}; make its tokens of the images that are there")
        spans[number] = (start, image)
    place = spans[-1][0] if spans else 0
    for image in images[len(spans) :]:
        count = image.num_tokens
        first = next((start for start, end in runs if start >= place and end - start == count), None)
        if first is None:
            raise ValueError(
                f"{name} its tokens have no run of {count} placeholders ({processor.placeholder}) for image"
                f" {len(spans) + 1}; add_images(sample, spans) notes where one is"
            )
        spans.append((first, image))
        place = first + count
    return spans


def _check_pixels(sample: Sample, inputs: object, images: Sequence[ImageRef], processor: ProcessorFiles) -> None:
    """Check that what a hook has set as `multimodal_train_inputs` are the pixels of the images, less than a level off.

    Raises ValueError: they are others: engines and trainers would see different images.
    """
    if not isinstance(inputs, Mapping) or inputs.get("pixel_values") is None:
        return
    from fusionrl.data.processor import train_inputs

    for name, wanted in ((train_inputs(images, processor) if images else None) or {"pixel_values": ()}).items():
        values, numbers = np.asarray(inputs.get(name), np.float32), np.asarray(wanted, np.float32)
        if values.shape != numbers.shape or not np.allclose(values, numbers, atol=0.01):
            raise ValueError(
                f"sample {sample.index}: {name} of multimodal_train_inputs are not those of its {len(images)} images;"
                " trainers make them of multimodal_inputs['images']: put images of your own there"
            )
