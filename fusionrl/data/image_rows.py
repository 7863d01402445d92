"""Images in rows of prompt data: placeholders in texts, values of the image column, and what can be wrong with them.

In a text `<image>` means the next image of the column. A message whose content is a list of parts keeps their
order: {"type": "image"} is the next image of the column, {"type": "image", "image": …} and {"type": "image_url", …}
bring their own. A value is bytes, {"bytes": …, "path": …}, a path or a `data:` URI. Texts of the assistant stay as they
are: a model may write `<image>`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from fusionrl.data.columns import IMAGE, ImageColumn, SeenRow
from fusionrl.data.findings import Finding, FindingError
from fusionrl.data.images import (
    ImageLimits,
    ImageRef,
    decoded,
    image_size,
    key_of_file,
)

PLACEHOLDERS = {IMAGE: "<image>", "video": "<video>", "audio": "<audio>"}
_OTHER_PARTS = frozenset(("video", "video_url", "audio", "audio_url", "input_audio"))
IMAGE_PARTS = frozenset((IMAGE, "image_url", "input_image"))
_IMAGE_FIELDS = (IMAGE, "image_url", "source", "url", "path")  # of such a part
_URL_HINT = "download it first: what a run fetches may be another image the next time"

Message = dict[str, Any]
# Its bytes, sizes that the model takes, its path where it has one → the reference to an image.
TakeImage: TypeAlias = Callable[[bytes, ImageLimits, str | None], ImageRef]


# ------------------------------------------------------------------------------------------------ parts of messages
def seen_row(row: Mapping[str, object], prompt: object, key: str) -> SeenRow:
    """Split the texts of a prompt at the placeholders of images, and give each image its value.

    Raises FindingError: not as many placeholders as images, or parts of other kinds.
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
        self.row, self.key, self.values = row, key, listed(row.get(key))
        self.taken: list[object] = []
        self.num_left = len(self.values)

    def take(self) -> None:
        if not self.num_left:
            if self.row.get(self.key) is None:
                cause = (
                    f"column {self.key!r} (--multimodal-keys) is missing, but the prompt has a placeholder of an image"
                )
                raise FindingError(Finding(cause))
            cause = f"column {self.key!r} has fewer images than the prompt has placeholders"
            raise FindingError(Finding(cause, f"{len(self.values)} images"))
        self.taken.append(self.values[-self.num_left])
        self.num_left -= 1

    def refuse_media(self, text: str) -> None:
        """Refuse a placeholder of a medium that the row has a column of."""
        for kind, placeholder in PLACEHOLDERS.items():
            if kind != IMAGE and placeholder in text and (self.row.get(kind) or self.row.get(f"{kind}s")):
                raise FindingError(Finding(f"the prompt has a placeholder {placeholder}; only images are trained on"))


def _split_message(message: Message, column: _Column) -> Message:
    content, is_said = message.get("content"), message.get("role") == "assistant"
    if isinstance(content, str) and not is_said:
        parts = list(_split_text(content, column))
        return {**message, "content": parts} if PLACEHOLDERS[IMAGE] in content else message
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for item in content for part in _split_part(item, column, is_said)]}


def _split_text(text: str, column: _Column) -> Iterator[Message]:
    column.refuse_media(text)
    for number, piece in enumerate(text.split(PLACEHOLDERS[IMAGE])):
        if number:
            column.take()
            yield {"type": IMAGE}
        if piece:
            yield {"type": "text", "text": piece}


def _split_part(part: object, column: _Column, is_said: bool) -> Iterator[object]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in IMAGE_PARTS | _OTHER_PARTS:
        if isinstance(part, dict) and kind == "text" and PLACEHOLDERS[IMAGE] in str(part.get("text")) and not is_said:
            yield from _split_text(part["text"], column)
        else:
            yield part
        return
    if kind in _OTHER_PARTS:
        raise FindingError(Finding(f"a message has a part of the type {kind!r}; only images are trained on"))
    value = image_value(part)
    if value is None and kind == IMAGE:
        column.take()
    elif value is None:
        raise FindingError(Finding(f"a message has a part of the type {kind!r} without an image"))
    else:
        column.taken.append(value)
    yield {"type": IMAGE}


def image_value(part: Mapping[str, object]) -> object:
    """Return the image that a part of the `IMAGE_PARTS` brings, in a protocol's or a template's form; None: none."""
    value = next((part[name] for name in _IMAGE_FIELDS if part.get(name) is not None), None)
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "base64":
        return f"data:{value.get('media_type')};base64,{value.get('data')}"
    return value.get("url", value)


# ------------------------------------------------------------------------------------------------ values
@dataclass
class ImageFile:
    """An image file: its bytes, and its path where it has one."""

    content: bytes
    source: str | None = None


def image_file(value: object, folder: Path) -> ImageFile:
    """Return the image that a value of a row names.

    folder  where a relative path begins

    Raises FindingError: another kind of value, or no such file.
    """
    if isinstance(value, dict):
        value = value.get("image", value.get("path")) if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageFile(bytes(value))
    if not isinstance(value, str) or not value:
        hint = "give bytes, {'bytes': …, 'path': …}, a path or a data: URI"
        raise FindingError(Finding("the kind of an image is unknown", f"{type(value).__name__} {value!r:.60}", hint))
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


def read_images(
    values: Sequence[object], column: ImageColumn, folder: Path, take: TakeImage
) -> tuple[list[ImageRef], list[Finding]]:
    """Return what `take` makes of the images of a row, and what is wrong with the others."""
    refs, findings = [], []
    for number, value in enumerate(values, 1):
        try:
            file = image_file(value, folder)
            refs.append(take(file.content, column.processor.limits, file.source))
        except FindingError as error:
            findings.append(replace(error.finding, detail=f"image {number}: {error.finding.detail}"))
        except ValueError as error:
            cause, _, detail = str(error).partition(" (")
            findings.append(Finding(cause, f"image {number}" + (f": {detail.removesuffix(')')}" if detail else "")))
    return refs, findings


def header_ref(content: bytes, limits: ImageLimits, source: str | None = None) -> ImageRef:
    """Return a reference without a key to an image file, by its header alone; no store has its pixels.

    Raises ValueError: no image that can be read, or one that does not fit the limits.
    """
    size = limits.fit(*image_size(content))
    return ImageRef("", *size, limits.num_tokens(*size), source)


def decoded_ref(content: bytes, limits: ImageLimits, source: str | None = None) -> ImageRef:
    """As `header_ref`, with its key, of an image that can be decoded to its end."""
    image = header_ref(content, limits, source)
    decoded(content)
    return replace(image, key=key_of_file(content, image.height, image.width))
