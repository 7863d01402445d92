"""Images as a model sees them: references, one normal form, places among tokens, processor settings. No torch.

Two processors may exist for one checkpoint, and their resizes are not the same function. So an image is resized once,
when it enters a run, to a size that no processor changes: engines and trainers then see the same pixels.

A sample's ids are *expanded*: an image has `ImageRef.num_tokens` placeholders there. Engines expand ids themselves and
get them *collapsed*: one placeholder an image. Both ways go by recorded spans, never by what ids look like: a model may
sample a placeholder, too.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from fusionrl.observe.formats import read_object

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200  # of the longer side to the shorter: processors refuse more
_ORIENTATION = 0x0112  # EXIF's tag
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # its values → PIL's `Transpose` that makes an image upright
_SWAPS = (2, 4, 5, 6)  # those that swap height and width
_MOST_UNITS = 255  # tokens of a side: Kimi-VL's tower knows the places of 512 patches, and its processor takes fewer
_RESIZES = 8  # of a thin image, until its size stays
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
UNREADABLE = (OSError, SyntaxError, EOFError)  # what PIL raises at a broken file


@dataclass(frozen=True)
class ImageRef:
    """A reference to an image; copies of a sample share it.

    key            hash from which the pixels of the normal form follow
    height, width  pixels of the normal form
    num_tokens     its placeholders in expanded ids
    source         file of the original; None: it came as bytes or pixels, which the store has
    """

    key: str
    height: int
    width: int
    num_tokens: int
    source: str | None = field(default=None, compare=False)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return interned, (self.key, self.height, self.width, self.num_tokens, self.source)


_living: weakref.WeakValueDictionary[str, ImageRef] = weakref.WeakValueDictionary()
_naming = threading.RLock()  # of what is collected meanwhile, something may ask for a reference


def interned(key: str, height: int, width: int, num_tokens: int, source: str | None = None) -> ImageRef:
    """Return the one reference of this process to an image: that is how a store knows when the last one is gone."""
    image = ImageRef(key, height, width, num_tokens, source)
    with _naming:
        return _living.setdefault(key, image)


ImageSpan: TypeAlias = tuple[int, ImageRef]  # (place of the first placeholder in expanded ids, the image)


@dataclass(frozen=True)
class ImageLimits:
    """Sizes that a model takes.

    patch                   pixels of a patch's side
    merge                   so many by so many patches are one token
    min_pixels, max_pixels  of an image
    pads                    images are not enlarged, and are filled up with black to whole tokens (Kimi-VL)
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    pads: bool = False

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of the normal form of an image of this size.

        Raises ValueError: it has no pixels, or is too thin.
        """
        if self.pads:
            return padded_size(height, width, self.unit, self.max_pixels)
        size = (height, width)
        for _ in range(_RESIZES):  # `smart_resize` leaves a thin image over the limit, and would make it smaller again
            fitted = smart_resize(*size, self.unit, self.min_pixels, self.max_pixels)
            if fitted == size:
                return size
            size = fitted
        raise ValueError(
            f"no size between {self.min_pixels:,} and {self.max_pixels:,} pixels fits an image of"
            f" {width} x {height} with sides that are multiples of {self.unit}"
        )

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of placeholders of an image whose normal form has this size."""
        return (height // self.unit) * (width // self.unit)

    def grid(self, image: ImageRef) -> tuple[int, int, int]:
        """Return the patches of an image as (1, rows, columns)."""
        return (1, image.height // self.patch, image.width // self.patch)


def smart_resize(height: int, width: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width), multiples of `unit`, with about the same ratio and a product within the limits.

    The function of Qwen2-VL's processor (arXiv:2409.12191), and of its successors.

    Raises ValueError: no pixels, or one side over `MAX_ASPECT` times the other.
    """
    _check_pixels(height, width)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"one side of the image is over {MAX_ASPECT} times the other ({width} x {height} pixels)")
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
    elif rows * columns * unit**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
    return rows * unit, columns * unit


def padded_size(height: int, width: int, unit: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width), multiples of `unit`, of an image that is filled up with black.

    As Kimi-VL's processor pads, which lets the padding exceed the limit and so would make the result smaller again. A
    larger image is scaled down until it fits with its padding.

    Raises ValueError: no pixels.
    """
    _check_pixels(height, width)
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    while True:
        rows, columns = (max(1, -(-round(side * scale) // unit)) for side in (height, width))
        if rows * columns * unit**2 <= max_pixels and max(rows, columns) <= _MOST_UNITS:
            return rows * unit, columns * unit
        scale = max((rows - 1) * unit / height, (columns - 1) * unit / width)


def content_size(height: int, width: int, padded: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of an image of this size within its `padded` form, from the upper left on."""
    scale = min(1.0, padded[0] / height, padded[1] / width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _check_pixels(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise ValueError(f"the image has {width} x {height} pixels")


# ------------------------------------------------------------------------------------------------ files and pixels
def image_size(content: bytes) -> tuple[int, int]:
    """Return (height, width) of an image file, upright; reads its header alone.

    Raises ValueError: no image that can be read.
    """
    image, turn = _opened(content)
    width, height = image.size
    return (width, height) if turn in _SWAPS else (height, width)


def decoded(content: bytes) -> Image:
    """Return the first frame of an image file, upright, in RGB. ValueError: no image that can be read."""
    from PIL.Image import Transpose

    image, turn = _opened(content)
    try:
        image = as_rgb(image)
    except UNREADABLE as error:
        raise ValueError(f"the image cannot be decoded ({error})") from error
    return image if turn is None else image.transpose(Transpose(turn))


def picture(content: bytes) -> Image:
    """Return the image of a file that `png_of` made, as it was."""
    image, _ = _opened(content)
    image.load()
    return image


def png_of(image: Image) -> bytes:
    """Return an image as a PNG file, in RGB where PNG has not its colours."""
    content = io.BytesIO()
    (image if image.mode in _PNG_MODES else as_rgb(image)).save(content, "PNG", compress_level=1)
    return content.getvalue()


def _opened(content: bytes) -> tuple[Image, int | None]:
    """Open an image file by its header; also return how to turn what is decoded. Raises as `image_size`."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(content))
        # PNG's own `getexif` decodes the image; a TIFF is turned when it is decoded, and has that size before.
        value = 0 if image.format == "TIFF" else Image.Image.getexif(image).get(_ORIENTATION, 0)
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image file of a known format") from error
    except (*UNREADABLE, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be opened ({error})") from error
    return image, _TURNS.get(value)


def as_rgb(image: Image) -> Image:
    """Return an image in RGB; of 16-bit grey values the upper eight bits, of transparent pixels their colours."""
    from PIL.Image import fromarray

    image.load()
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        is_small = image.mode == "I" and grey.max() < 256  # eight bits in words of 32
        image = fromarray((grey if is_small else grey >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def normal_form(image: bytes | Image, limits: ImageLimits) -> np.ndarray:
    """Return [h, w, 3] uint8, the normal form of an image file or of an image in RGB.

    Raises ValueError: no image that can be read, or one that does not fit the limits.
    """
    picture = decoded(image) if isinstance(image, bytes) else image
    return resized(picture, *limits.fit(picture.height, picture.width), limits.pads)


def resized(image: Image, height: int, width: int, pads: bool = False) -> np.ndarray:
    """Return [height, width, 3] uint8 of an image in RGB; `pads`: as `ImageLimits` have it."""
    from PIL.Image import Resampling

    rows, columns = content_size(image.height, image.width, (height, width)) if pads else (height, width)
    if image.size != (columns, rows):
        image = image.resize((columns, rows), Resampling.BICUBIC)
    pixels = np.array(image)
    return np.pad(pixels, ((0, height - rows), (0, width - columns), (0, 0))) if pads else pixels


def key_of_file(content: bytes, height: int, width: int) -> str:
    """Return the key of the normal form, of this size, of an image file: without decoding it."""
    digest = hashlib.sha256(b"file %d %d " % (height, width))
    digest.update(content)
    return digest.hexdigest()[:32]


def patches(pixels: np.ndarray, limits: ImageLimits, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Return [h / patch * w / patch, 3 * 2 * patch²] float32, what a Qwen processor makes of a normal form.

    Patches of one token follow one another; a patch holds each of its channels twice, for two equal frames.
    """
    (height, width, _), p, m = pixels.shape, limits.patch, limits.merge
    scaled = pixels.astype(np.float32) * np.float32(1 / 255)
    normal = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    values: np.ndarray = normal.reshape(height // p // m, m, p, width // p // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.broadcast_to(values[:, :, :, :, :, None], (*values.shape[:5], 2, p, p))
    return np.ascontiguousarray(frames.reshape(height * width // p**2, -1))


# ------------------------------------------------------------------------------------------------ among tokens
def expanded(ids: Sequence[int] | np.ndarray, images: Sequence[ImageRef], placeholder: int, start: int = 0) -> Expanded:
    """Expand ids in which the n-th placeholder means the n-th image.

    start  place of the first id in the sample's expanded ids

    Raises ValueError: another number of placeholders than of images.
    """
    tokens = np.asarray(ids, np.int32)
    places = np.flatnonzero(tokens == placeholder)
    if len(places) != len(images):
        raise ValueError(f"{len(places)} placeholders of images in the tokens, but {len(images)} images")
    counts = np.ones(len(tokens), np.int64)
    counts[places] = [image.num_tokens for image in images]
    firsts = start + np.cumsum(counts)[places] - counts[places]
    return Expanded(np.repeat(tokens, counts), list(zip(firsts.tolist(), images, strict=True)), counts)


@dataclass(frozen=True)
class Expanded:
    """Expanded ids [n] int32, the span of each image, and of each collapsed id how often `ids` has it."""

    ids: np.ndarray
    spans: list[ImageSpan]
    counts: np.ndarray


def collapsed(values: object, spans: Sequence[ImageSpan], dtype: type = np.int32) -> np.ndarray:
    """Return ids [n], for an engine, or other values of the tokens: of each recorded span the first alone."""
    array: np.ndarray = np.asarray(values, dtype)
    if not spans:
        return array
    is_kept = np.ones(len(array), bool)
    for first, image in spans:
        is_kept[first + 1 : first + image.num_tokens] = False
    return array[is_kept]


def span_problem(
    tokens: np.ndarray, spans: Sequence[ImageSpan], prompt_length: int, loss_mask: np.ndarray | None
) -> str | None:
    """Return what is wrong with the spans of a sample; None for nothing.

    Spans ascend, do not overlap, and lie within the prompt or within the response; all their tokens are one
    placeholder, and those of the response are not trained on.
    """
    end, placeholder = 0, None
    for first, image in spans:
        last, name = first + image.num_tokens, f"the image at token {first}"
        if first < end:
            return f"{name} begins within the one before it, or before it"
        if last > len(tokens):
            return f"{name} has {image.num_tokens} tokens, but only {len(tokens) - first} follow"
        if first < prompt_length < last:
            return f"{name} lies across the end of the prompt, {prompt_length}"
        placeholder = tokens[first] if placeholder is None else placeholder
        if np.any(tokens[first:last] != placeholder):
            return f"the tokens of {name} are not all its placeholder, {placeholder}"
        if first >= prompt_length and (
            loss_mask is None or np.any(loss_mask[first - prompt_length : last - prompt_length] != 0)
        ):
            return f"{name} is part of the response, but its loss_mask is not 0"
        end = last
    return None


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
        """Return the same with other limits of pixels, where they are given. ValueError: no image fits them."""
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

    Raises ValueError: the folder is not of a model that takes images, or a file holds something else than numbers.
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

    Raises ValueError: as `read_processor_files` and `ProcessorFiles.limited`.
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
