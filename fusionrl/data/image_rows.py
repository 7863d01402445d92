"""Images in rows of prompt data: placeholders in texts, values of the image column, and what can be wrong with them.

In a text `<image>` stands for the next image of the column. A message whose content is a list of parts keeps their
order: {"type": "image"} is the next image of the column, {"type": "image", "image": …} and {"type": "image_url", …}
bring their own. A value is bytes, {"bytes": …, "path": …}, a path or a `data:` URI.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from fusionrl.data.findings import Finding, FindingError
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, image_size, key_of_file
from fusionrl.data.processor_files import ProcessorFiles, read_processor_files

IMAGE = "image"
PLACEHOLDERS = {IMAGE: "<image>", "video": "<video>", "audio": "<audio>"}
_OTHER_PARTS = frozenset(("video", "video_url", "audio", "audio_url", "input_audio"))
_IMAGE_PARTS = frozenset((IMAGE, "image_url", "input_image"))
_URL_HINT = "download it first: what a run fetches may be another image the next time"

Message = dict[str, Any]


@dataclass(frozen=True)
class ImageColumn:
    """Where the rows of a set have their images, and for which model.

    key                     the column
    checkpoint              --hf-checkpoint, whose files say what sizes images have
    folder                  --multimodal-folder, where relative paths begin; None: the folder of the data file
    min_pixels, max_pixels  --image-min-pixels, --image-max-pixels; None: those of the checkpoint
    """

    key: str
    checkpoint: str
    folder: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @functools.cached_property
    def processor(self) -> ProcessorFiles:
        """The settings of the images; ValueError: the checkpoint has none, or the limits fit no image."""
        return read_processor_files(self.checkpoint).limited(self.min_pixels, self.max_pixels)

    @classmethod
    def of(cls, args: object, checkpoint: str | None) -> ImageColumn | None:
        """Return what a hook's `args`, or the settings of an evaluation set, say; None: the data have no images."""
        key = (getattr(args, "multimodal_keys", None) or {}).get(IMAGE)
        names = ("multimodal_folder", "image_min_pixels", "image_max_pixels")
        return cls(key, str(checkpoint), *(getattr(args, name, None) for name in names)) if key else None

    def folder_of(self, data_file: Path) -> Path:
        """Return the folder in which relative paths begin."""
        return Path(self.folder) if self.folder is not None else data_file if data_file.is_dir() else data_file.parent


def media_errors(keys: Mapping[str, object], flag: str) -> list[str]:
    """Return what is wrong with columns by kind, as --multimodal-keys names them."""
    errors = [f'{flag}: {kind}: only images are trained on; give {{"image": COLUMN}}' for kind in keys if kind != IMAGE]
    if not isinstance(keys.get(IMAGE, ""), str):
        errors.append(f"{flag}: {keys[IMAGE]!r} is not the name of a column")
    return errors


# ------------------------------------------------------------------------------------------------ parts of messages
@dataclass
class SeenRow:
    """A row's prompt with images as parts {"type": "image"}, and the value of each image, in order.

    prompt  as it came where the row has no images
    """

    prompt: object
    values: list[object]


def seen_row(row: Mapping[str, object], prompt: object, key: str) -> SeenRow:
    """Split the texts of a prompt at the placeholders of images, and give each image its value.

    Raises:
        FindingError: not as many placeholders as images, or parts of other kinds.
    """
    column = _Column(row, key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return SeenRow(prompt, [])  # what is wrong with it is another check's
    split = [_split_message(message, column) for message in messages]
    if column.num_left:
        num_images, num_placeholders = len(column.values), len(column.values) - column.num_left
        cause = f"column {key!r} has more images than the prompt has placeholders"
        detail = f"{num_images} images, {num_placeholders} placeholders"
        raise FindingError(Finding(cause, detail, f"write {PLACEHOLDERS[IMAGE]} where an image belongs"))
    return SeenRow(split if column.taken else prompt, column.taken)


def listed(value: object) -> list[object]:
    """Return the images of a column's value, which may be one alone."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


class _Column:
    """The images of a row, of which each placeholder takes the next."""

    def __init__(self, row: Mapping[str, object], key: str) -> None:
        self.key, self.is_there, self.values = key, row.get(key) is not None, listed(row.get(key))
        self.taken: list[object] = []
        self.num_left = len(self.values)

    def take(self) -> None:
        if not self.num_left:
            if not self.is_there:
                cause = (
                    f"column {self.key!r} (--multimodal-keys) is missing, but the prompt has a placeholder of an image"
                )
                raise FindingError(Finding(cause))
            cause = f"column {self.key!r} has fewer images than the prompt has placeholders"
            raise FindingError(Finding(cause, f"{len(self.values)} images"))
        self.taken.append(self.values[-self.num_left])
        self.num_left -= 1


def _split_message(message: Message, column: _Column) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        if PLACEHOLDERS[IMAGE] not in content:
            _refuse_media(content)
            return message
        return {**message, "content": list(_split_text(content, column))}
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for item in content for part in _split_part(item, column)]}


def _split_text(text: str, column: _Column) -> Iterator[Message]:
    _refuse_media(text)
    for number, piece in enumerate(text.split(PLACEHOLDERS[IMAGE])):
        if number:
            column.take()
            yield {"type": IMAGE}
        if piece:
            yield {"type": "text", "text": piece}


def _refuse_media(text: str) -> None:
    for kind, placeholder in PLACEHOLDERS.items():
        if kind != IMAGE and placeholder in text:
            raise FindingError(Finding(f"the prompt has a placeholder {placeholder}; only images are trained on"))


def _split_part(part: object, column: _Column) -> Iterator[object]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _IMAGE_PARTS | _OTHER_PARTS:
        if isinstance(part, dict) and kind == "text" and PLACEHOLDERS[IMAGE] in str(part.get("text")):
            yield from _split_text(part["text"], column)
        else:
            yield part
        return
    if kind in _OTHER_PARTS:
        raise FindingError(Finding(f"a message has a part of the type {kind!r}; only images are trained on"))
    value = part.get(str(kind), part.get(IMAGE))
    value = value.get("url") if isinstance(value, dict) and "url" in value else value
    if value is None and kind == IMAGE:
        column.take()
    elif value is None:
        raise FindingError(Finding(f"a message has a part of the type {kind!r} without an image"))
    else:
        column.taken.append(value)
    yield {"type": IMAGE}


# ------------------------------------------------------------------------------------------------ values
@dataclass
class ImageFile:
    """An image file: its bytes, and its path where it has one."""

    content: bytes
    source: str | None = None


def image_file(value: object, folder: Path) -> ImageFile:
    """Return the image that a value of a row names.

    folder  where a relative path begins

    Raises:
        FindingError: another kind of value, or no such file.
    """
    if isinstance(value, dict):
        value = value.get("image", value.get("path")) if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageFile(bytes(value))
    if not isinstance(value, str) or not value:
        hint = "give bytes, {'bytes': …, 'path': …}, a path or a data: URI"
        raise FindingError(Finding("an image is of an unknown kind", f"{type(value).__name__} {value!r:.60}", hint))
    if value.startswith("data:"):
        return ImageFile(_of_uri(value))
    if value.startswith(("http://", "https://")):
        raise FindingError(Finding("an image is a URL", f"{value:.80}", _URL_HINT))
    path = folder / (unquote(value.removeprefix("file://")) if value.startswith("file://") else value)
    try:
        return ImageFile(path.read_bytes(), str(path.resolve()))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "relative paths begin in the folder of the data file, or in --multimodal-folder"
        raise FindingError(
            Finding("the file of an image cannot be read", f"{str(path)!r:.160}: {reason}", hint)
        ) from error


def _of_uri(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    try:
        if not comma:
            raise ValueError("no comma follows its type")
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    except (ValueError, binascii.Error) as error:
        raise FindingError(Finding("an image is a data: URI that cannot be read", str(error))) from error


def image_findings(values: Sequence[object], column: ImageColumn, folder: Path) -> list[Finding]:
    """Return what is wrong with the images of a row, by their headers."""
    findings = []
    for number, value in enumerate(values, 1):
        try:
            column.processor.limits.fit(*image_size(image_file(value, folder).content))
        except FindingError as error:
            findings.append(Finding(error.finding.cause, f"image {number}: {error.finding.detail}", error.finding.hint))
        except ValueError as error:
            cause, _, detail = str(error).partition(" (")
            findings.append(Finding(cause, f"image {number}" + (f": {detail.removesuffix(')')}" if detail else "")))
    return findings


def unstored_refs(values: Sequence[object], column: ImageColumn, folder: Path) -> list[ImageRef]:
    """Return references to the images of a row in which nothing is wrong; no store has their pixels."""
    limits, refs = column.processor.limits, []
    for value in values:
        content = image_file(value, folder).content
        size = limits.fit(*image_size(content))
        refs.append(ImageRef(key_of_file(content, *size), *size, limits.num_tokens(*size)))
    return refs


def image_refs(values: Sequence[object], column: ImageColumn, folder: Path) -> list[ImageRef]:
    """Take the images of a row into the store of this process.

    Raises:
        ValueError: names the first that cannot be read, or does not fit.
    """
    refs = []
    for number, value in enumerate(values, 1):
        try:
            file = image_file(value, folder)
            refs.append(IMAGES.add_file(file.content, column.processor.limits, file.source))
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error
    return refs
