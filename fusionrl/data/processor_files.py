"""Settings of a model's image processor, from the files of its folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusionrl.data.images import ImageLimits
from fusionrl.observe.formats import read_object

# transformers' defaults, where a file leaves a field out.
_PATCH, _MERGE, _MIN_PIXELS, _MAX_PIXELS = 14, 2, 56 * 56, 28 * 28 * 1280
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Of config.json; the first is there, or the second (Kimi-VL).
_MEDIA = ("image_token_id", "media_placeholder_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True)
class ProcessorFiles:
    """What the files of a folder say of images.

    limits        sizes that images are brought to
    mean, std     of each channel, of values between 0 and 1
    placeholder   token id that means an image
    media_tokens  ids that mean images, videos or sounds
    start         id before a placeholder; None: not known
    """

    limits: ImageLimits
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: int
    media_tokens: tuple[int, ...]
    start: int | None = None

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> ProcessorFiles:
        """Return the same with other limits of pixels, where they are given.

        Raises:
            ValueError: no image fits them.
        """
        limits = self.limits
        least, most = min_pixels or limits.min_pixels, max_pixels or limits.max_pixels
        if most < limits.unit**2:
            raise ValueError(
                f"--image-max-pixels {most}: a token of this model's images has {limits.unit} x {limits.unit} ="
                f" {limits.unit**2} pixels; give that or more"
            )
        if least > most:
            cause = f"--image-min-pixels {least} is over --image-max-pixels {most}"
            from_file = "min" if min_pixels is None else "max" if max_pixels is None else ""
            raise ValueError(cause + (f" (the {from_file}imum is that of the model's files)" if from_file else ""))
        if limits.pads and min_pixels is not None:
            raise ValueError(f"--image-min-pixels {min_pixels}: this model's images are not enlarged; leave it out")
        return replace(self, limits=replace(limits, min_pixels=least, max_pixels=most))


@functools.cache
def read_processor_files(folder: str | Path) -> ProcessorFiles:
    """Read preprocessor_config.json, or where transformers 5 puts the same, and config.json.

    Raises:
        ValueError: the folder is not of a model that takes images, or a file holds something else than numbers.
    """
    folder = Path(folder)
    nested: Any = (read_object(folder / "processor_config.json") or {}).get("image_processor")
    settings: Any = nested if isinstance(nested, dict) else read_object(folder / "preprocessor_config.json")
    if settings is None:
        raise ValueError(f"{folder} has no preprocessor_config.json, which says what images its model takes")
    config = read_object(folder / "config.json") or {}
    media = tuple(token for name in _MEDIA if type(token := config.get(name)) is int)
    if not any(type(config.get(name)) is int for name in _MEDIA[:2]):
        raise ValueError(f"{folder}/config.json has no {_MEDIA[0]}: its model does not take images")
    try:
        return ProcessorFiles(
            _limits(settings),
            tuple(map(float, settings.get("image_mean") or _MEAN)),
            tuple(map(float, settings.get("image_std") or _STD)),
            media[0],
            media,
            start if isinstance(start := config.get("vision_start_token_id"), int) else None,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: the settings of its image processor cannot be read ({error})") from error


def widest_limits(folder: str | Path, pixels: Sequence[tuple[int | None, int | None]]) -> ImageLimits:
    """Return limits that leave the normal forms of several data sets as they are.

    pixels  (least, most) of each set; None: those of the folder

    Raises:
        ValueError: as `read_processor_files` and `ProcessorFiles.limited`.
    """
    limits = [read_processor_files(folder).limited(*pair).limits for pair in pixels]
    least, most = min(limit.min_pixels for limit in limits), max(limit.max_pixels for limit in limits)
    return replace(limits[0], min_pixels=least, max_pixels=most)


def _limits(settings: Mapping[str, object]) -> ImageLimits:
    if "in_token_limit" in settings:
        return _padding_limits(settings)
    size = settings.get("size")
    size = size if isinstance(size, dict) else {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = settings.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    sizes = settings.get("patch_size") or _PATCH, settings.get("merge_size") or _MERGE
    patch, merge, least, most = _numbers(*sizes, least, most)
    return ImageLimits(patch, merge, least, most)


def _padding_limits(settings: Mapping[str, object]) -> ImageLimits:
    """Kimi-VL's, whose limit counts patches."""
    if settings.get("pad_input") is not True:
        raise ValueError("pad_input is not true: images that are cut at their sides are not supported")
    kernel = settings.get("merge_kernel_size") or [_MERGE, _MERGE]
    if not isinstance(kernel, list) or len({*kernel}) != 1:
        raise ValueError(f"merge_kernel_size {kernel!r} is not a square")
    patch, merge, most = _numbers(settings.get("patch_size") or _PATCH, kernel[0], settings["in_token_limit"])
    if most < merge**2:
        raise ValueError(f"in_token_limit {most} is below the {merge**2} patches of one token")
    return ImageLimits(patch, merge, 1, most * patch**2, pads=True)


def _numbers(*values: object) -> list[int]:
    numbers = []
    for number in values:
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{number!r} is not a number of pixels")
        numbers.append(number)
    return numbers
