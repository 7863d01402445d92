"""The columns of rows of prompt data: of prompts and labels, of images, and of adapters."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.data.findings import Finding, FindingError

if TYPE_CHECKING:
    from fusionrl.data.images import ImageRef, ProcessorFiles
    from fusionrl.data.sample import Sample


IMAGE = "image"  # a kind of medium, and the type of such a part of a message


@dataclass(frozen=True)
class AdapterColumn:
    """The column that names the adapter of a row."""

    key: str  # of the row, or of its metadata
    names: tuple[str, ...]  # of the run's adapters
    of_set: str | None = None  # the adapter of rows that name none; None: each must name one

    @classmethod
    def of(cls, args: Namespace) -> AdapterColumn | None:
        """Return what the flags `args` say; None: the run has one adapter, or none."""
        names = tuple(spec.partition("=")[0] for spec in getattr(args, "lora_adapters", None) or ())
        return cls(args.adapter_key, names) if len(names) > 1 else None

    def adapter(self, row: Mapping[str, object], metadata: Mapping[str, object]) -> str:
        """Return the adapter of a row. FindingError: it names none, or one that the run does not have."""
        values = (row.get(self.key), metadata.get(self.key), self.of_set)
        value = next((value for value in values if value is not None), None)
        if isinstance(value, str) and value in self.names:
            return value
        hint = f"--lora-adapters has {', '.join(self.names)}"
        if value is None:
            cause = f"no adapter: column {self.key!r} (--adapter-key) is missing, and no adapter has the set's name"
            raise FindingError(Finding(cause, hint=hint))
        raise FindingError(Finding(f"column {self.key!r} (--adapter-key) names no adapter", repr(value)[:80], hint))


def check_adapter(sample: Sample, names: Sequence[str]) -> None:
    """Check that a sample names one of several adapters. ValueError: it names another one, or none."""
    if names and sample.adapter not in names:
        cure = f"set sample.adapter to one of --lora-adapters ({', '.join(names)})"
        raise ValueError(f"sample {sample.index} has the adapter {sample.adapter!r:.80}; {cure}")


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
        from fusionrl.data.images import read_processor_files

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


@dataclass
class SeenRow:
    """A row's prompt with images as parts {"type": "image"}, and the value of each image, in order."""

    prompt: object  # as it came where the row has no images
    values: list[object]
    images: list[ImageRef] = field(default_factory=list)  # what was made of the values, where they were read


@dataclass(frozen=True)
class PromptColumns:
    """The columns of a row, and the way from a prompt to tokens.

    keeps_messages  without a chat template a list of messages stays one: a user's function makes tokens of it
    images          where the rows have images; None: they have none
    checkpoint      --hf-checkpoint, the model of the images
    adapters        where rows name their adapters; None: the run has one, or none
    """

    input_key: str
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str | None = None
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    max_prompt_len: int | None = None
    keeps_messages: bool = False
    images: ImageColumn | None = None
    checkpoint: str | None = None
    adapters: AdapterColumn | None = None

    @classmethod
    def of(cls, args: Namespace, keeps_messages: bool) -> PromptColumns:
        """Return what the flags `args` say."""
        return cls(
            args.input_key,
            args.label_key,
            args.metadata_key,
            args.tool_key,
            args.apply_chat_template,
            args.apply_chat_template_kwargs,
            args.rollout_max_prompt_len,
            keeps_messages,
            ImageColumn.of(args, args.hf_checkpoint),
            args.hf_checkpoint,
            AdapterColumn.of(args),
        )

    def of_set(self, settings: object, keeps_messages: bool) -> PromptColumns:
        """Return the columns of an evaluation set with these settings (`EvalSet`), for the same model."""
        names = ("input_key", "label_key", "metadata_key", "tool_key")
        keys = {name: getattr(settings, name) for name in names}
        keys |= {"images": ImageColumn.of(settings, self.checkpoint), "keeps_messages": keeps_messages}
        return replace(self, **keys).in_set(getattr(settings, "adapter", None) or str(getattr(settings, "name", "")))

    def in_set(self, name: str) -> PromptColumns:
        """Return the columns of a set of rows: an adapter of its name is that of rows that name none."""
        column = self.adapters
        if column is None or column.of_set is not None or name not in column.names:
            return self
        return replace(self, adapters=replace(column, of_set=name))


TOKENS, LOSS_MASK = "tokens", "loss_mask"


def holds_tokens(row: Mapping[str, object]) -> bool:
    """Return whether a row has both columns; one alone is a column of something else."""
    return row.get(TOKENS) is not None and row.get(LOSS_MASK) is not None


def media_errors(keys: Mapping[str, object], flag: str) -> list[str]:
    """Return what is wrong with columns by kind, as --multimodal-keys names them."""
    errors = [f'{flag}: {kind}: only images are trained on; give {{"image": COLUMN}}' for kind in keys if kind != IMAGE]
    if IMAGE in keys and not (isinstance(keys[IMAGE], str) and keys[IMAGE]):
        errors.append(f"{flag}: {keys[IMAGE]!r} is not the name of a column")
    return errors
