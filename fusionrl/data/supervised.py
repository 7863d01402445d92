"""Samples of supervised training: conversations, texts with their responses, and rows of tokens.

Rows of token ids and a loss mask are trained on exactly as they stand. `--mode reject-sampling` writes them where text
alone would lose which tokens the model sampled: answers of several turns, with a tool's text between them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.data.chat import MultiTurnLossMaskGenerator
from fusionrl.data.findings import Finding
from fusionrl.data.images import ImageRef, collapsed, expanded
from fusionrl.data.render import STEP_LOSS_MASK, WEIGHT
from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.tokenizer import read_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS, LOSS_MASK = "tokens", "loss_mask"
_LARGEST_ID = int(np.iinfo(np.int32).max)


def holds_tokens(row: Mapping[str, object]) -> bool:
    """Return whether a row has both columns; one alone is a column of something else."""
    return row.get(TOKENS) is not None and row.get(LOSS_MASK) is not None


def token_columns(sample: Sample) -> dict[str, np.ndarray]:
    """Return both columns of a sample: the mask runs over all tokens, and is 0 on the prompt's. An image has one token.

    Raises:
        ValueError: the sample's fields do not fit together.
    """
    sample.validate()
    mask = np.concatenate([np.zeros(sample.prompt_length, np.float32), response_mask(sample)])
    is_binary = bool(np.isin(mask, (0, 1)).all())  # a share of a token cannot be read back, and is not rounded here
    spans = sample.image_spans
    return {
        TOKENS: collapsed(sample.array("tokens"), spans),
        LOSS_MASK: collapsed(mask, spans, np.int32 if is_binary else np.float32),
    }


def token_finding(row: Mapping[str, object], vocab_size: int | None) -> Finding | None:
    """Return what is wrong with both columns of a row; None for nothing.

    vocab_size  of the model, where it is known: ids of tokens are below it
    """
    tokens, mask = row[TOKENS], row[LOSS_MASK]
    for name, values in ((TOKENS, tokens), (LOSS_MASK, mask)):
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            return Finding(f"column {name!r} is not a list of whole numbers")
    assert isinstance(tokens, list) and isinstance(mask, list)
    if not tokens:
        return Finding(f"column {TOKENS!r} is empty")
    most = _LARGEST_ID if vocab_size is None else vocab_size - 1
    wrong = next((token for token in tokens if not 0 <= token <= most), None)
    if wrong is not None:
        hint = "are they of another model's tokenizer?"
        return Finding(f"column {TOKENS!r} holds an id that is not in the vocabulary (0..{most})", str(wrong), hint)
    if len(mask) != len(tokens):
        cause = f"columns {TOKENS!r} and {LOSS_MASK!r} differ in length; give one value of the mask for each token"
        return Finding(cause, f"{len(tokens)} and {len(mask)}")
    if not set(mask) <= {0, 1}:
        return Finding(f"column {LOSS_MASK!r} holds another value than 0 and 1")
    if 1 not in mask:
        return Finding(f"column {LOSS_MASK!r} is 0 on every token; nothing is left to train on")
    if mask[0] == 1:
        return Finding(f"column {LOSS_MASK!r} is 1 on the first token; nothing stands before it to predict it from")
    return None


def token_sample(row: Mapping[str, Any], prompt: str | list[dict[str, Any]]) -> Sample:
    """Return the sample of a row in which nothing is wrong; its response begins at the first trained token."""
    return _sample(prompt, row[TOKENS], row[LOSS_MASK], row[LOSS_MASK].index(1))


def conversation_to_sample(
    messages: list[dict[str, object]], masks: MultiTurnLossMaskGenerator, tools: object = None
) -> Sample:
    """A sample of a conversation: the response begins at the first trained token; what follows the last is left out.

    Raises:
        ValueError: nothing to train on, or no right mask can be made (see `get_loss_mask`).
    """
    tokens, mask = masks.get_loss_mask(messages, tools)
    if 1 not in mask:
        raise ValueError(f"the conversation has nothing to train on: {STEP_LOSS_MASK} or {WEIGHT} of every turn is 0")
    end = len(mask) - mask[::-1].index(1)
    return _sample(messages, tokens[:end], mask[:end], mask.index(1))


def _sample(
    prompt: str | list[dict[str, Any]], tokens: Sequence[int], mask: Sequence[int], prompt_length: int
) -> Sample:
    """Return a sample of all tokens [T] and their mask [T]."""
    return Sample(
        prompt=prompt,
        tokens=np.asarray(tokens, np.int32),
        response_length=len(tokens) - prompt_length,
        loss_mask=np.asarray(mask[prompt_length:], np.int32),
        reward=0.0,
        status=Status.COMPLETED,
    )


def with_images(sample: Sample, images: Sequence[ImageRef], placeholder: int) -> Sample:
    """Return a sample whose tokens have one placeholder for each of its images, expanded.

    Raises:
        ValueError: another number of placeholders than of images, or an image that is to be trained on.
    """
    whole = expanded(np.asarray(sample.array("tokens")), images, placeholder)
    mask = np.concatenate([np.zeros(sample.prompt_length, np.int32), np.asarray(sample.array("loss_mask"))])
    if images and np.any(mask[np.asarray(sample.array("tokens")) == placeholder]):
        raise ValueError("an image in a turn of the assistant cannot be trained on")
    prompt_length = int(whole.counts[: sample.prompt_length].sum())
    sample.tokens, sample.loss_mask = whole.ids, np.repeat(mask, whole.counts)[prompt_length:]
    sample.response_length, sample.image_spans = len(whole.ids) - prompt_length, whole.spans
    return sample


@dataclass
class SupervisedSamples:
    """Makes samples with their loss masks.

    loss_mask_type   one of LOSS_MASK_TYPES, for conversations
    template_kwargs  keyword arguments of the chat template
    """

    tokenizer: PreTrainedTokenizerBase
    loss_mask_type: str = "auto"
    template_kwargs: Mapping[str, object] | None = None

    def make(self, prompt: object, label: object, tools: object = None) -> Sample:
        """Return the sample of a row: a list of messages, or text with its response.

        Raises:
            ValueError: a conversation that nothing can be trained on or no right mask can be made of, or a text prompt
                without a text label.
        """
        if isinstance(prompt, list):
            return conversation_to_sample(prompt, self._masks, tools)
        if not isinstance(prompt, str) or not isinstance(label, str):
            raise ValueError(
                "--mode sft: a row needs a list of messages (--input-key), or a text prompt and its response as text"
                " (--label-key)"
            )
        tokens, response = self._encode(prompt), self._response(label)
        return _sample(prompt, tokens + response, [0] * len(tokens) + [1] * len(response), len(tokens))

    def _response(self, text: str) -> list[int]:
        """Return the tokens of a response with the end token, which a text may have already.

        A text may also end with another token at which engines stop (<|im_end|> where eos_token is <|endoftext|>): a
        token behind that is never sampled. So is a line break that a rendered text has there.
        """
        tokens, stripped = self._encode(text), text.rstrip()
        ended = tokens if stripped == text else self._encode(stripped)
        if ended and ended[-1] in self._ends:
            return ended
        if self.tokenizer.eos_token_id is None:
            name = self.tokenizer.name_or_path
            raise ValueError(
                f"the tokenizer of --hf-checkpoint {name} has no eos_token, by which a response ends; set one in its"
                " tokenizer_config.json"
            )
        return [*tokens, int(self.tokenizer.eos_token_id)]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @functools.cached_property
    def _masks(self) -> MultiTurnLossMaskGenerator:
        return MultiTurnLossMaskGenerator(self.tokenizer, self.loss_mask_type, self.template_kwargs)

    @functools.cached_property
    def _ends(self) -> set[int | None]:
        folder = self.tokenizer.name_or_path
        return {self.tokenizer.eos_token_id, *(read_end_tokens(folder) if folder else ())}
