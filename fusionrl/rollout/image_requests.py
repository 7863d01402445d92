"""Images of samples in requests to engines.

A sample's tokens are expanded, an engine gets them collapsed (`data.images`): one placeholder for each image. All of a
sample's images go with each request; SGLang keys what it caches by their content, so it knows earlier turns.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pybase64

from fusionrl.base.sockets import LOOPBACK
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import Expanded, ImageRef, ProcessorFiles, collapsed, expanded
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import adopt_images
from fusionrl.engines.answers import AnswerError
from fusionrl.engines.images import FOLDER, MediaTokens

_being_made: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[None]] = {}  # by images' keys
_TOLD_BY = 8  # tokens: a sampled placeholder and those before it


def media_tokens() -> MediaTokens | None:
    """Return the ids of media of the run's model; None: it is asked about text alone."""
    processor = IMAGES.processor
    return None if processor is None else MediaTokens(processor.placeholder, processor.media_tokens, processor.start)


async def request_tokens(args: Namespace, sample: Sample, processor: ProcessorFiles) -> dict[str, object] | None:
    """Return `input_ids` of a request that continues a sample, and `image_data` where it has images.

    None: no engine may get its tokens (`may_not_return`).
    """
    adopt_images(sample, processor)
    if may_not_return(sample):
        return None
    await _make_images(args, sample)
    tokens = np.asarray(sample.array("tokens"))
    if not sample.image_spans:
        return {"input_ids": tokens.tolist()}
    images = [image for _, image in sample.image_spans]
    return {"input_ids": collapsed(tokens, sample.image_spans).tolist(), "image_data": image_data(args, images)}


async def _make_images(args: Namespace, sample: Sample) -> None:
    """Make what a request has of a sample's images, apart from the event loop: a large PNG takes a second.

    Siblings wait for the same, and continue in one turn of the event loop: `RequestMerger` sends them together.
    """
    loop = asyncio.get_running_loop()
    for _, image in sample.image_spans:
        if _is_made(args, image):
            continue
        if (task := _being_made.get((loop, image.key))) is None:
            task = _being_made[loop, image.key] = loop.create_task(_make(args, image))
        await asyncio.shield(task)  # which one sibling's end does not cancel


async def _make(args: Namespace, image: ImageRef) -> None:
    try:
        await asyncio.to_thread(image_data, args, [image])
    finally:
        del _being_made[asyncio.get_running_loop(), image.key]


def _is_made(args: Namespace, image: ImageRef) -> bool:
    return _path(args, image).exists() if _by_file(args) else IMAGES.has_png(image)


def image_data(args: Namespace, images: Iterable[ImageRef]) -> list[str]:
    """Return `image_data` of a request: PNG files of the normal forms, or their addresses (--image-transport)."""
    if not _by_file(args):
        return ["data:image/png;base64," + pybase64.b64encode(IMAGES.png(image)).decode() for image in images]
    return [_file(image, _path(args, image)) for image in images]


def _by_file(args: Namespace) -> bool:
    transport = getattr(args, "image_transport", "data")
    if transport != "auto":
        return bool(transport == "file")
    hosts = {urlsplit(url).hostname for url in getattr(args, "engine_urls", None) or ()}
    return getattr(args, "run_dir", None) is not None and hosts == {LOOPBACK}


def _path(args: Namespace, image: ImageRef) -> Path:
    # A name of this reference: when an earlier one of the same image is gone, so is its file.
    return Path(args.run_dir, FOLDER, f"{image.key}-{id(image):x}.png")


def _file(image: ImageRef, path: Path) -> str:
    """The address of an image's file, which lives as long as the image does."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        new.write_bytes(IMAGES.png(image))
        new.replace(path)
        weakref.finalize(image, path.unlink, missing_ok=True)
    return path.absolute().as_uri()


def with_images(tokens: Sequence[int], images: Sequence[ImageRef], start: int = 0) -> Expanded:
    """Return rendered tokens with as many placeholders as the images have tokens, and the images' places.

    start  place of the first token in the sample

    Raises:
        ValueError: the tokens have not one placeholder for each image.
    """
    placeholder = -1 if IMAGES.processor is None else IMAGES.processor.placeholder
    return expanded(np.asarray(tokens, np.int32), images, placeholder, start)


def may_not_return(sample: Sample) -> bool:
    """Return whether no engine may get a sample's tokens back: the model has sampled a placeholder of a medium.

    Trainers take it for a token as any other; an engine would look for its image.
    """
    return bool(barred_parts(sample))


def barred_parts(sample: Sample) -> list[np.ndarray]:
    """Return the end of the tokens, int32, after which no engine may get a sample's; empty: one may get all of them."""
    if (media := media_tokens()) is None or not sample.response_length:
        return []
    tokens = np.array(sample.array("tokens"), np.int32)
    others = tokens.copy()
    for first, image in sample.image_spans:
        others[first : first + image.num_tokens] = -1
    if not media.bar(others):
        return []
    end = next(iter(np.flatnonzero(np.isin(others, media.known)) + 1), len(tokens))
    return [tokens[max(0, end - _TOLD_BY) : end]]


METRICS = """
rollout/images | images | Images of all samples, each counted in every sample that has it. | --multimodal-keys
rollout/image_tokens | tokens | Tokens of these images. | --multimodal-keys
rollout/sampled_placeholders | samples | Samples in which the model has written the placeholder of an image or another
    medium; no engine continues them. | --multimodal-keys
"""


def image_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Count images, their tokens, and samples with a placeholder that the model sampled."""
    media = media_tokens()
    assert media is not None, "a run of text has no images"
    num_known = np.array([np.isin(np.asarray(sample.array("tokens")), media.known).sum() for sample in samples])
    num_own = np.array([sum(image.num_tokens for _, image in sample.image_spans) for sample in samples])
    return {
        "rollout/images": float(sum(len(sample.image_spans) for sample in samples)),
        "rollout/image_tokens": float(num_own.sum()),
        "rollout/sampled_placeholders": float((num_known > num_own).sum()),
    }


def check_expanded(prompt_tokens: object, num_tokens: int, whose: str) -> None:
    """Check that an engine has read as many tokens as there are here.

    Raises:
        AnswerError: it has not.
    """
    if prompt_tokens != num_tokens:
        raise AnswerError(
            f"meta_info.prompt_tokens is {prompt_tokens}, and {whose} had {num_tokens} tokens:"
            " the engine cuts its images otherwise than trainers do, or has tokenized its text again"
        )
