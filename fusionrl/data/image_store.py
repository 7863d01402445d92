"""The images of a process: their originals, their normal forms and what engines get, each once, by key.

    original     a file that the data name, else bytes in a scratch file of the run's folder
    normal form  in memory, made of the original when it is wanted; those that were not used for longest go first
    PNG          of the normal form, for engines; as the normal forms

An image lives as long as a sample, a prompt or a saved state has its reference: when the last one is gone, so is the
image. Nothing counts them but Python. Another process of this machine may read what one has: `lend`, `borrow`.
"""

from __future__ import annotations

import bisect
import io
import os
import tempfile
import threading
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from fusionrl.data.images import (
    UNREADABLE,
    ImageLimits,
    ImageRef,
    ProcessorFiles,
    as_rgb,
    decoded,
    image_size,
    interned,
    key_of_file,
    png_of,
    resized,
)
from fusionrl.observe.formats import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

Value = TypeVar("Value", np.ndarray, bytes)
MEGABYTE = 1 << 20
DEFAULT_BYTES = 2048 * MEGABYTE


@dataclass(frozen=True)
class Loan:
    """Where another process finds images while the one that has them holds their references.

    processor  the model's settings of images
    file       path of its scratch file
    extents    of the images there, and checksums of their bytes; others have a source
    """

    processor: ProcessorFiles
    file: str = ""
    extents: tuple[tuple[ImageRef, Extent, int], ...] = ()


class ImageStore:
    """See the module's docstring. For several threads."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES, folder: Path | None = None) -> None:
        self._lock = threading.RLock()
        self._living: dict[str, weakref.ref[ImageRef]] = {}
        self._dead: deque[str] = deque()  # keys of references that are gone
        self._scratch: ScratchFile | None = None
        self._extents: dict[str, tuple[Extent, int]] = {}  # with the checksum of what was written
        self._borrowed: dict[str, tuple[str, Extent, int]] = {}  # the same, of a scratch file of another process
        self._cache: OrderedDict[tuple[str, str], np.ndarray | bytes] = OrderedDict()
        self.num_bytes = 0  # of the cache
        self.configure(max_bytes, folder)

    def configure(
        self,
        max_bytes: int,
        folder: Path | None,
        processor: ProcessorFiles | None = None,
        engine_limits: ImageLimits | None = None,
    ) -> None:
        """Set the size of the cache, where the scratch file will be (None: with temporary files), the model's settings
        of images, and the limits of its engines (default: the same)."""
        self._max_bytes, self._folder, self.processor = max_bytes, folder, processor
        self.engine_limits = processor.limits if engine_limits is None and processor is not None else engine_limits

    # ------------------------------------------------------------------------------------------------ put in
    def add_file(self, content: bytes, limits: ImageLimits, source: str | None = None) -> ImageRef:
        """Take in an image file, and return the reference to it; its pixels are not decoded yet.

        source  its path, where it has one

        Raises ValueError: no image that can be read, or one that does not fit the limits.
        """
        size = limits.fit(*image_size(content))
        key = key_of_file(content, *size)
        image = interned(key, *size, limits.num_tokens(*size), source)
        with self._lock:
            self._watch(image)
            if image.source is None:
                self._write(key, content)
        return image

    def add_picture(self, picture: Image, limits: ImageLimits) -> ImageRef:
        """Take in an image that a tool or a hook made; raises as `add_file`."""
        try:
            picture = as_rgb(picture)
        except UNREADABLE as error:
            raise ValueError(f"the image cannot be decoded ({error})") from error
        image = self.add_file(png_of(picture), limits)
        self._put("pixels", image, _frozen(resized(picture, image.height, image.width, limits.pads)))
        return image

    def _write(self, key: str, content: bytes) -> None:
        if key not in self._extents:
            if self._scratch is None:
                self._scratch = ScratchFile(self._folder)
            self._extents[key] = self._scratch.write(content), zlib.crc32(content)

    def _watch(self, image: ImageRef) -> None:
        """Drop the image when its reference is gone."""
        self._sweep()
        if (living := self._living.get(image.key)) is None or living() is None:
            self._living[image.key] = weakref.ref(image, partial(_note_death, self._dead, image.key))

    def _sweep(self) -> None:
        while self._dead:
            key = self._dead.popleft()
            if (living := self._living.get(key)) is None or living() is not None:
                continue  # it came again
            del self._living[key]
            for kind in ("pixels", "png"):
                self._forget((kind, key))
            self._borrowed.pop(key, None)
            if (written := self._extents.pop(key, None)) is not None:
                assert self._scratch is not None
                self._scratch.give_back(written[0])

    # ------------------------------------------------------------------------------------------------ take out
    def pixels(self, image: ImageRef) -> np.ndarray:
        """Return the normal form, [h, w, 3] uint8, not to be written to.

        Raises ValueError: its original is gone, or is another one now.
        """
        found = self._get("pixels", image.key)
        if isinstance(found, np.ndarray):
            return found
        pads = self.processor is not None and self.processor.limits.pads
        return self._put("pixels", image, _frozen(resized(self.original(image), image.height, image.width, pads)))

    def png(self, image: ImageRef) -> bytes:
        """Return the normal form as a PNG file; raises as `pixels`."""
        from PIL.Image import fromarray

        found = self._get("png", image.key)
        return found if isinstance(found, bytes) else self._put("png", image, png_of(fromarray(self.pixels(image))))

    def has_png(self, image: ImageRef) -> bool:
        """Return whether `png` answers at once."""
        return self._get("png", image.key) is not None

    def thumbnail(self, image: ImageRef, side: int = 256) -> bytes:
        """Return the normal form as a small JPEG file, for people; raises as `pixels`."""
        from PIL.Image import fromarray

        picture, content = fromarray(self.pixels(image)), io.BytesIO()
        picture.thumbnail((side, side))
        picture.save(content, "JPEG", quality=85)
        return content.getvalue()

    def original(self, image: ImageRef) -> Image:
        """Return the original in RGB, upright, or the normal form where that alone was saved; raises as `pixels`."""
        content = self._content(image)
        try:
            return decoded(content)
        except ValueError as error:
            raise ValueError(f"image {image.source or image.key}: {error}") from error

    def _content(self, image: ImageRef) -> bytes:
        """Return the file of an image; raises as `pixels`."""
        with self._lock:
            self._sweep()
            written, scratch, borrowed = self._extents.get(image.key), self._scratch, self._borrowed.get(image.key)
        if written is not None and scratch is not None:
            return scratch.read(written[0])
        if borrowed is None and image.source is None:
            raise ValueError(f"the pixels of image {image.key} are not in this process, and no file has them")
        path = str(image.source) if borrowed is None else borrowed[0]
        try:
            if borrowed is not None:
                file, extent, checksum = borrowed
                with open(file, "rb") as reader:
                    reader.seek(extent.start)
                    content = reader.read(extent.size)
                if zlib.crc32(content) == checksum:
                    return content
                reason = "the process that had them needs them no more"
                raise ValueError(f"the pixels of image {image.key} are gone: {reason}")
            content = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"the image {path} cannot be read any more ({error})") from error
        if key_of_file(content, image.height, image.width) != image.key:
            raise ValueError(f"the image {path} has changed since the run began with it")
        return content

    # ------------------------------------------------------------------------------------------------ cache
    def _get(self, kind: str, key: str) -> np.ndarray | bytes | None:
        with self._lock:
            self._sweep()
            if (value := self._cache.get((kind, key))) is not None:
                self._cache.move_to_end((kind, key))
        return value

    def _put(self, kind: str, image: ImageRef, value: Value) -> Value:
        with self._lock:
            self._watch(image)
            self._forget((kind, image.key))
            self._cache[kind, image.key] = value
            self.num_bytes += _size(value)
            while self.num_bytes > self._max_bytes and self._cache:
                self._forget(next(iter(self._cache)))
        return value

    def _forget(self, place: tuple[str, str]) -> None:
        if (value := self._cache.pop(place, None)) is not None:
            self.num_bytes -= _size(value)

    # ------------------------------------------------------------------------------------------------ checkpoints
    def save(self, images: Iterable[ImageRef], folder: Path) -> None:
        """Write the normal form of each image that is not there yet, `<key>.png`, to a folder."""
        for image in images:
            if not (path := folder / f"{image.key}.png").exists():
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, [self.png(image)])

    def load(self, images: Iterable[ImageRef], folder: Path) -> None:
        """Take in images whose originals are gone, or are others now, from a folder that `save` wrote."""
        for image in images:
            try:
                self._content(image)
            except ValueError:
                if (path := folder / f"{image.key}.png").is_file():
                    with self._lock:
                        self._watch(image)
                        self._write(image.key, path.read_bytes())

    # ------------------------------------------------------------------------------------------------ other processes
    def lend(self, images: Iterable[ImageRef]) -> Loan | None:
        """Return where another process of this machine reads images; None where this one has none."""
        if self.processor is None:
            return None
        with self._lock:
            known = ((image, self._extents.get(image.key)) for image in images)
            extents = tuple((image, *written) for image, written in known if written is not None)
            if not extents or self._scratch is None:
                return Loan(self.processor)
            return Loan(self.processor, self._scratch.address, extents)

    def borrow(self, loan: Loan) -> None:
        """Read images of another process from now on."""
        with self._lock:
            self.processor = loan.processor
            for image, extent, checksum in loan.extents:
                self._watch(image)
                self._borrowed[image.key] = (loan.file, extent, checksum)


def _note_death(dead: deque[str], key: str, _: object) -> None:
    # Whatever thread collects garbage calls this, also one that holds the lock; the next call of the store sweeps.
    dead.append(key)


def _frozen(pixels: np.ndarray) -> np.ndarray:
    pixels.flags.writeable = False
    return pixels


def _size(value: np.ndarray | bytes) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(value)


IMAGES = ImageStore()
"""The store of this process; the Buffer configures it."""


class Extent(NamedTuple):
    """A part of the file."""

    start: int
    size: int


class ScratchFile:
    """Holds pieces of bytes; space of those that are given back is used again. For several threads.

    folder  on whose file system it is; None: that of temporary files
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it lives as long as this object)
        self._free: list[Extent] = []  # ascending; no two touch
        self._lock = threading.Lock()
        self.num_bytes = 0  # of the file

    @property
    def address(self) -> str:
        """Path of the file for other processes of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def write(self, content: bytes) -> Extent:
        """Put bytes aside.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            extent = self._take(len(content))
        view, place = memoryview(content), extent.start
        while view:
            written = os.pwrite(self._file.fileno(), view, place)
            view, place = view[written:], place + written
        return extent

    def _take(self, size: int) -> Extent:
        for number, free in enumerate(self._free):
            if free.size >= size:
                rest = Extent(free.start + size, free.size - size)
                self._free[number : number + 1] = [rest] if rest.size else []
                return Extent(free.start, size)
        extent = Extent(self.num_bytes, size)
        self.num_bytes += size
        return extent

    def read(self, extent: Extent) -> bytes:
        """Return the bytes that `write` put there."""
        parts, place, left = [], extent.start, extent.size
        while left and (part := os.pread(self._file.fileno(), left, place)):
            parts.append(part)
            place, left = place + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self, extent: Extent) -> None:
        """Let the space be used again."""
        with self._lock:
            number = bisect.bisect(self._free, extent)
            start, end = extent.start, extent.start + extent.size
            if number < len(self._free) and self._free[number].start == end:
                end += self._free.pop(number).size
            if number and sum(self._free[number - 1]) == start:
                number -= 1
                start = self._free.pop(number).start
            if end == self.num_bytes:
                self.num_bytes = start
                os.ftruncate(self._file.fileno(), start)
            else:
                self._free.insert(number, Extent(start, end - start))
