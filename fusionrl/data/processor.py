"""A processor of text and images with the calls of Hugging Face's, made of a tokenizer and the normal form.

Without torchvision, and with the same pixels and ids that engines and trainers see. For users' functions.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusionrl.data.image_rows import IMAGE_PARTS, image_value
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import expanded
from fusionrl.data.processor_files import ProcessorFiles, read_processor_files
from fusionrl.data.sample_images import as_ref
from fusionrl.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fusionrl.data.stored_image import StoredImage


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

        Raises:
            ValueError: videos, or another number of placeholders than of images.
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
            from fusionrl.data.stored_image import train_inputs

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
    from fusionrl.data.stored_image import StoredImage

    files = IMAGES.processor if processor is None else getattr(processor, "files", IMAGES.processor)
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    values = [image_value(part) for part in parts if part.get("type") in IMAGE_PARTS]
    return [StoredImage(as_ref(value, files), is_new=True) for value in values if value is not None] or None
