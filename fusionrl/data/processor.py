"""Images as users' functions get them: of PIL, from the store, and a processor with the calls of Hugging Face's.

Without torchvision, and with the same pixels and ids that engines and trainers see. An image of `multimodal_inputs`
reads its pixels at their first use.
"""

from __future__ import annotations

import functools
import weakref
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL._util import DeferredError

from fusionrl.data.image_rows import IMAGE_PARTS, image_file, image_value
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, ProcessorFiles, expanded, patches, picture, png_of, read_processor_files
from fusionrl.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from PIL._imaging import PixelAccess
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Processed(dict[str, object]):
    """What a processor returns: its values are attributes, too."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Processor:
    """See the module's docstring.

    image_processor  has the numbers of the model's image processor
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, files: ProcessorFiles) -> None:
        self.tokenizer, self.files = tokenizer, files
        limits = files.limits
        self.image_processor = Namespace(
            patch_size=limits.patch,
            merge_size=limits.merge,
            temporal_patch_size=2,
            min_pixels=limits.min_pixels,
            max_pixels=limits.max_pixels,
            size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
            image_mean=list(files.mean),
            image_std=list(files.std),
        )
        self.image_token_id = files.placeholder
        self.image_token = str(tokenizer.convert_ids_to_tokens(files.placeholder))
        self.chat_template = tokenizer.chat_template
        self.apply_chat_template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
        self.decode, self.batch_decode = tokenizer.decode, tokenizer.batch_decode

    def __call__(
        self, text: str | Sequence[str] = "", images: object = None, videos: object = None, **options: object
    ) -> Processed:
        """Return input_ids and attention_mask, a list for each text, and of images pixel_values and image_grid_thw.

        A placeholder of a text means the next image, and is expanded to all its tokens.

        Raises ValueError: videos, or another number of placeholders than of images.
        """
        if videos:
            raise ValueError("videos are not trained on")
        of_texts = options.get("text_kwargs")
        if options.get("return_tensors") or (isinstance(of_texts, Mapping) and of_texts.get("return_tensors")):
            raise ValueError("the processor returns lists of ids; give no return_tensors for texts")
        refs = [as_ref(image, self.files) for image in _flat(images)]
        texts, left, ids = [text] if isinstance(text, str) else list(text), list(refs), []
        for each in texts:
            tokens = self.tokenizer.encode(each, add_special_tokens=False)
            count = tokens.count(self.image_token_id)
            taken, left = left[:count], left[count:]
            ids.append(expanded(tokens, taken, self.image_token_id).ids.tolist())
        if left:
            raise ValueError(f"{len(refs)} images, but the text has {len(refs) - len(left)} placeholders for them")
        processed = Processed(input_ids=ids, attention_mask=[[1] * len(each) for each in ids])
        if refs:
            processed.update(train_inputs(refs, self.files) or {})
        return processed


def _flat(images: object) -> list[object]:
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        return [images]
    return [image for item in images for image in _flat(item)]


def load_processor(folder: str) -> Processor | None:
    """Return the processor of a model that sees, with the run's limits of pixels; None for one of text alone."""
    try:
        files = read_processor_files(folder)
    except ValueError:
        return None
    run = IMAGES.processor
    is_model_of_run = run is not None and replace(run, limits=files.limits) == files
    return Processor(load_tokenizer(folder), run if run is not None and is_model_of_run else files)


def images_of_messages(messages: object, processor: Processor | None) -> list[StoredImage] | None:
    """Return the images of messages whose parts bring their own, as images of PIL; None for none."""
    files = IMAGES.processor if processor is None else getattr(processor, "files", IMAGES.processor)
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    values = [image_value(part) for part in parts if part.get("type") in IMAGE_PARTS]
    return [StoredImage(as_ref(value, files), is_new=True) for value in values if value is not None] or None


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


def as_ref(value: object, processor: ProcessorFiles | None) -> ImageRef:
    """Return the reference to an image that a hook or a tool gives: of PIL, or as in a row of the data.

    Raises ValueError: it cannot be read, or does not fit.
    """
    if isinstance(value, ImageRef):
        return value
    if (ref := ref_of(value)) is not None:
        return ref
    if processor is None:
        raise ValueError("an image in a run without --multimodal-keys")
    if isinstance(value, Image.Image):
        return IMAGES.add_picture(value, processor.limits)
    image = IMAGES.add_file(image_file(value, Path()).content, processor.limits)  # a copy: a tool may delete its files
    IMAGES.pixels(image)  # raises where it cannot be decoded
    return image
