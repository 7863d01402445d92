"""Images of PIL that read their pixels from the store at their first use: hooks get them in `multimodal_inputs`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from PIL import Image

from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, patches
from fusionrl.data.processor_files import ProcessorFiles

if TYPE_CHECKING:
    from PIL._imaging import PixelAccess
    from torch import Tensor


class StoredImage(Image.Image):
    """The normal form of an image; copies are references, too, and changes are made in copies, as with open files."""

    def __init__(self, ref: ImageRef) -> None:
        super().__init__()
        self.ref = ref
        self._mode, self._size = "RGB", (ref.width, ref.height)

    def load(self) -> PixelAccess | None:
        """Read the pixels, where that was not done yet."""
        if self._im is None:
            self.im = Image.fromarray(IMAGES.pixels(self.ref)).im
        return super().load()

    def __copy__(self) -> Self:
        return type(self)(self.ref)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return type(self)(self.ref)

    def __reduce__(self) -> tuple[type[StoredImage], tuple[ImageRef]]:
        return type(self), (self.ref,)

    def __repr__(self) -> str:
        return f"<image {self.ref.width} x {self.ref.height} {self.ref.key}>"


def image_inputs(images: Sequence[ImageRef]) -> dict[str, object]:
    """Return `Sample.multimodal_inputs` of a sample with these images."""
    return {"images": [StoredImage(image) for image in images], "videos": None}


def ref_of(image: object) -> ImageRef | None:
    """Return the reference of a stored image whose pixels nobody changed; None for another object."""
    if not isinstance(image, StoredImage):
        return None
    is_changed = image._im is not None and not np.array_equal(np.asarray(image), IMAGES.pixels(image.ref))
    return None if is_changed else image.ref


def train_inputs(images: Sequence[ImageRef], processor: ProcessorFiles | None = None) -> dict[str, Tensor] | None:
    """Return {"pixel_values": [patches, numbers of one] float32, "image_grid_thw": [images, 3]} as torch tensors.

    None in a process that does not know what processor the model has.
    """
    import torch

    if (processor := processor or IMAGES.processor) is None:
        return None
    p, settings = processor.limits.patch, (processor.limits, processor.mean, processor.std)
    values = np.concatenate([patches(IMAGES.pixels(image), *settings) for image in images])
    grids = [[1, image.height // p, image.width // p] for image in images]
    return {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.tensor(grids)}


def picture(content: bytes) -> Image.Image:
    """Return the image of a PNG file."""
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def png_of(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
