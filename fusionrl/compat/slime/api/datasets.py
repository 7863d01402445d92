"""Names of `slime.utils.data`, `processing_utils` and `types`: prompts, tokenizers, processors, kinds of inputs.

Videos and sounds are not trained on.
"""

from __future__ import annotations

import base64
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fusionrl.data import processor, tokenizer
from fusionrl.data.columns import ImageColumn, PromptColumns, media_errors
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ProcessorFiles, png_of
from fusionrl.data.processor import Processor, as_ref, images_of_messages
from fusionrl.data.prompts import load_prompts
from fusionrl.data.rows import read_rows
from fusionrl.data.sample import Sample

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

DEFAULT_PATCH_SIZE = 14


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl or .parquet file, `path@[start:stop]` a part of them.

    Raises:
        ValueError: a row that cannot be read, with its line; slime prints it and reads on.
    """
    for _, row in read_rows(path, "read_file"):
        yield dict(row)


class Dataset:
    """The prompts of a file, as samples; shuffled anew for each epoch."""

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        processor: object,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Read and render all rows; those with more than `max_length` tokens are left out.

        Raises:
            ValueError: a row that cannot be read or rendered, or keys of other kinds than images.
        """
        keys, files = dict(multimodal_keys or {}), getattr(processor, "files", IMAGES.processor)
        if errors := media_errors(keys, "Dataset: multimodal_keys"):
            raise ValueError("; ".join(errors))
        columns = PromptColumns(
            prompt_key,
            label_key,
            metadata_key,
            tool_key,
            apply_chat_template,
            apply_chat_template_kwargs,
            max_length,
            keeps_messages=True,
            images=ImageColumn.of(Namespace(multimodal_keys=keys, **_limits_of(files)), tokenizer.name_or_path),
        )
        self.origin_samples = load_prompts(path, tokenizer, columns, "Dataset").samples
        self.samples, self.seed, self.epoch_id = self.origin_samples, seed, -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Order the samples for an epoch; the same one again changes nothing."""
        if self.epoch_id != new_epoch_id:
            order = random.Random(self.seed + new_epoch_id).sample(range(len(self.origin_samples)), len(self))
            self.samples, self.epoch_id = [self.origin_samples[i] for i in order], new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def _limits_of(files: ProcessorFiles | None) -> dict[str, int]:
    """Return the run's limits of pixels, as flags name them."""
    if files is None:
        return {}
    limits = files.limits
    most = {"image_max_pixels": limits.max_pixels}
    return most if limits.pads else most | {"image_min_pixels": limits.min_pixels}


# ------------------------------------------------------------------------------------------------ processing_utils
def load_tokenizer(name_or_path: str, **kwargs: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, loaded once a process; with keywords other than trust_remote_code, anew."""
    if set(kwargs) <= {"trust_remote_code"} and Path(name_or_path).is_dir():
        return tokenizer.load_tokenizer(name_or_path)
    from transformers import AutoTokenizer  # seconds to import

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: object) -> Processor | None:
    """Return the processor of a model that sees; None for one of text alone."""
    return processor.load_processor(name_or_path)


def process_vision_info(prompt: object, processor: Processor | None) -> dict[str, object]:
    """Return {"images": images of PIL, "videos": None} of messages whose parts bring their own images."""
    return {"images": images_of_messages(prompt, processor), "videos": None}


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments of a Hugging Face processor: the inputs, ids as lists, all else as torch tensors."""
    inputs: dict[str, Any] = dict(multimodal_inputs or {})
    inputs["text_kwargs"] = {**inputs.get("text_kwargs", {}), "return_tensors": None, "return_mm_token_type_ids": False}
    for kind in ("audio_kwargs", "images_kwargs", "videos_kwargs"):
        inputs[kind] = {**inputs.get(kind, {}), "return_tensors": "pt"}
    return inputs


def encode_image_for_rollout_engine(image: Image) -> str:
    """Return an image (PIL) as a data URI of a PNG, as SGLang takes it; in a run, its normal form."""
    if IMAGES.processor is None:
        content = png_of(image)
    else:
        content = IMAGES.png(as_ref(image, IMAGES.processor))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


# ------------------------------------------------------------------------------------------------ types
@dataclass
class MultimodalType:
    """A kind of input: its name in a message's content, and its placeholder in a text."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds."""

    IMAGE: ClassVar = MultimodalType("image", "<image>")
    VIDEO: ClassVar = MultimodalType("video", "<video>")
    AUDIO: ClassVar = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Return the kinds."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the kind of a name."""
        return next((kind for kind in cls.all() if kind.name == name), None)
