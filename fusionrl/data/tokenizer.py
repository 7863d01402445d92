"""The tokenizer of a Hugging Face folder, and its chat template."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusionrl.data.auto_tokenizer import import_auto_tokenizer, torch_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateError(ValueError):
    """A chat template refuses a conversation."""


@functools.cache
def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, once a process."""
    import_auto_tokenizer()  # a second, only where a tokenizer is needed
    from transformers import AutoTokenizer

    with torch_left_out():
        return AutoTokenizer.from_pretrained(folder)


def call_template(render: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the text that `render(*args, **kwargs)` makes by a chat template.

    Raises:
        TemplateError: with the template's own words.
    """
    try:
        return str(render(*args, **kwargs))
    except Exception as error:  # a template is code of the model's folder, and may raise anything
        raise TemplateError(f"{type(error).__name__}: {error}") from error
