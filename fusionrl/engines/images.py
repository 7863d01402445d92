"""Images: what engines need to see them, and checks of requests before they are sent. Pure.

A request has one placeholder for each image in its ids, which SGLang repeats once for each token of the image. SGLang
(0.5.23) does not answer to ids in which they are repeated already, or answers with an error after which the client
would try again; it ignores an image too many, and takes a placeholder without an image for text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FOLDER = "engine-images"
"""Of a run, while it lasts: where engines find images as files."""


@dataclass(frozen=True)
class MediaTokens:
    """Ids of a model that its processor takes for media."""

    image: int  # the placeholder of an image
    known: tuple[int, ...]  # placeholders of all media: of images, videos and sound
    start: int | None  # the token before a placeholder; None: any

    def bar(self, sampled: Sequence[int] | np.ndarray) -> bool:
        """Return whether no engine may get these sampled tokens back, with the images of a prompt.

        It would look for the media of a placeholder, and fails (SGLang 0.5.23) where a start ends the ids.
        """
        tokens = np.asarray(sampled)
        return bool(np.isin(tokens, self.known).any()) or (len(tokens) > 0 and tokens[-1] == self.start)


def check_images(payload: Mapping[str, object], media: MediaTokens) -> None:
    """Check that a request has an image for each placeholder among its ids.

    Raises:
        ValueError: one of its prompts has more or fewer, placeholders that no start token precedes, or placeholders of
            another medium.
    """
    ids, images = payload.get("input_ids"), payload.get("image_data")
    if ids is None or not isinstance(ids, Sequence | np.ndarray):
        return
    is_batch = len(ids) > 0 and isinstance(ids[0], list | tuple | np.ndarray)
    prompts = list(ids) if is_batch else [ids]
    groups = image_groups(images, len(prompts), is_batch)
    for prompt, own in zip(prompts, groups, strict=True):
        tokens = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        count = tokens.count(media.image)
        if count != len(own):
            raise ValueError(
                f"input_ids have {count} placeholders of images (token {media.image}), and image_data has {len(own)}"
                " images: give one placeholder for each image; the engine repeats it for the image's tokens"
            )
        starts = [place for place, token in enumerate(tokens) if token == media.image]
        if media.start is not None and any(not place or tokens[place - 1] != media.start for place in starts):
            raise ValueError(f"input_ids: no token {media.start}, the start of an image, precedes each placeholder")
        if own and tokens[-1] == media.start:
            raise ValueError(f"input_ids end with token {media.start}, the start of an image; engines want its image")
        if other := next((token for token in media.known if token != media.image and token in tokens), None):
            raise ValueError(f"input_ids have token {other}, which engines take for a video or sound; it has no data")


def image_groups(images: object, num_prompts: int, is_batch: bool) -> list[list[object]]:
    """Return the images of each prompt: SGLang takes one, a list, and for several prompts a list for each.

    Raises:
        ValueError: another number of lists than of prompts.
    """
    if images is None:
        return [[] for _ in range(num_prompts)]
    if not isinstance(images, list | tuple):
        images = [images]
    if not is_batch:
        return [list(images)]
    if len(images) != num_prompts:
        raise ValueError(f"image_data has {len(images)} entries for {num_prompts} prompts; give one list for each")
    return [list(one) if isinstance(one, list | tuple) else [one] for one in images]


CACHE_VARIABLE = "SGLANG_VLM_CACHE_SIZE_MB"
"""MB of towers' features that an engine keeps; weight pushes do not empty it."""
KEEP_IDS_VARIABLE = "SGLANG_MM_AVOID_RETOKENIZE"
_PREPROCESSED_MB = 256  # of images that were decoded and cut: siblings send the same
_REFUSED = {
    "enable_multimodal": (False, "the engines would not see"),
    "language_model_only": (True, "the engines would not see"),
    "encoder_only": (True, "the engines would generate nothing"),
    "mm_preprocess_cache_size_mb": (0, "each sibling's images would be decoded and cut anew"),
}


@dataclass(frozen=True)
class ImageSettings:
    """Settings of an engine for images.

    trains_tower            whether pushes change the vision tower
    min_pixels, max_pixels  of an image's normal form; None: as the model's folder says
    """

    trains_tower: bool
    min_pixels: int | None = None
    max_pixels: int | None = None

    def arguments(self, device: str) -> dict[str, object]:
        """Return fields of `ServerArgs`."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        limits = {name: value for name, value in limits.items() if value is not None}
        return {
            "mm_preprocess_cache_size_mb": _PREPROCESSED_MB,
            **({"mm_process_config": {"image": limits}} if limits else {}),
            # Others pass on the device to a processor that does not know it.
            **({"image_processor_backend": "pil"} if device == "cpu" else {}),
        }

    def environment(self) -> dict[str, str]:
        """Return environment variables of an engine."""
        return {KEEP_IDS_VARIABLE: "1", **({CACHE_VARIABLE: "0"} if self.trains_tower else {})}


def refused(args: Mapping[str, object], prefix: str) -> str | None:
    """Return why an engine with these fields of `ServerArgs` cannot be asked about images; None: it can.

    prefix  of their flags, for the message
    """
    for name, (wrong, reason) in _REFUSED.items():
        if name in args and args[name] == wrong:
            return f"{prefix}{name.replace('_', '-')} {wrong}: {reason}; leave it out"
    return None
