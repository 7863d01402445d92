"""Images of PIL that read their pixels from the store at their first use: hooks get them in `multimodal_inputs`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL._util import DeferredError

from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, patches, picture, png_of
from fusionrl.data.processor_files import ProcessorFiles

if TYPE_CHECKING:
    from PIL._imaging import PixelAccess
    from torch import Tensor


class _Pixels:
    """The normal form of an image as PIL has it, which all its images share until they change theirs."""

    def __init__(self, ref: ImageRef) -> None:
        self.im = Image.fromarray(IMAGES.pixels(ref)).im


_shared: weakref.WeakValueDictionary[str, _Pixels] = weakref.WeakValueDictionary()


class StoredImage(Image.Image):
    """The normal form of an image. Copies are references, too, unless the image was changed.

    is_new  a hook took it from messages: it did not come with a row's sample
    """

    _pixels: _Pixels | None = None

    def __init__(self, ref: ImageRef, is_new: bool = False) -> None:
        super().__init__()
        self.ref, self.is_new, self.readonly = ref, is_new, 1
        self._mode, self._size = "RGB", (ref.width, ref.height)

    def load(self) -> PixelAccess | None:
        """Read the pixels, where that was not done yet. What changes them in place works on a copy."""
        if self._im is None or isinstance(self._im, DeferredError):  # closed
            self._pixels = _shared.get(self.ref.key) or _shared.setdefault(self.ref.key, _Pixels(self.ref))
            self.im = self._pixels.im
        return super().load()

    @property
    def is_changed(self) -> bool:
        """Return whether it is no longer the image of its reference."""
        is_there = self._im is not None and not isinstance(self._im, DeferredError)
        return is_there and (self._pixels is None or self._im is not self._pixels.im)

    def __copy__(self) -> Image.Image:
        return self.copy() if self.is_changed else type(self)(self.ref, self.is_new)

    def __deepcopy__(self, memo: dict[int, object]) -> Image.Image:
        return self.__copy__()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (picture, (png_of(self),)) if self.is_changed else (type(self), (self.ref, self.is_new))

    def __repr__(self) -> str:
        return f"<image {self.ref.width} x {self.ref.height} {self.ref.key}>"


def image_inputs(images: Sequence[ImageRef]) -> dict[str, object]:
    """Return `Sample.multimodal_inputs` of a sample with these images."""
    return {"images": [StoredImage(image) for image in images], "videos": None}


def ref_of(image: object) -> ImageRef | None:
    """Return the reference of a stored image without changes; None for another object."""
    return image.ref if isinstance(image, StoredImage) and not image.is_changed else None


def train_inputs(images: Sequence[ImageRef], processor: ProcessorFiles | None = None) -> dict[str, Tensor] | None:
    """Return {"pixel_values": [patches, numbers of one] float32, "image_grid_thw": [images, 3]} as torch tensors.

    None in a process that does not know what processor the model has.
    """
    import torch

    if (processor := processor or IMAGES.processor) is None:
        return None
    settings = (processor.limits, processor.mean, processor.std)
    values = np.concatenate([patches(IMAGES.pixels(image), *settings) for image in images])
    grids = [processor.limits.grid(image) for image in images]
    return {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.tensor(grids)}
