"""Prompt files as slime's `Dataset` and `read_file` give them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fusionrl.data.prompts import PromptColumns, load_prompts
from fusionrl.data.rows import read_rows
from fusionrl.data.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        multimodal_keys: object = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Read and render all rows; those with more than `max_length` tokens are left out.

        Raises:
            ValueError: a row that cannot be read or rendered, or keys of images, on which nothing is trained yet.
        """
        if multimodal_keys:
            raise ValueError(f"Dataset: multimodal_keys {multimodal_keys!r}: images are not trained on yet")
        columns = PromptColumns(
            prompt_key,
            label_key,
            metadata_key,
            tool_key,
            apply_chat_template,
            apply_chat_template_kwargs,
            max_length,
            keeps_messages=True,
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
