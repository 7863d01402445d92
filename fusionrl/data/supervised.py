"""Samples of supervised training: conversations, and texts with their responses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.data.chat import MultiTurnLossMaskGenerator, conversation_to_sample
from fusionrl.data.sample import Sample, Status
from fusionrl.data.tokenizer_files import read_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SupervisedSamples:
    """Makes samples with their loss masks.

    loss_mask_type   one of LOSS_MASK_TYPES, for conversations
    template_kwargs  keyword arguments of the chat template
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loss_mask_type: str = "auto",
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer, self._loss_mask_type, self._template_kwargs = tokenizer, loss_mask_type, template_kwargs

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
        return Sample(
            prompt=prompt,
            tokens=np.asarray(tokens + response, np.int32),
            response_length=len(response),
            loss_mask=np.ones(len(response), np.int32),
            reward=0.0,
            status=Status.COMPLETED,
        )

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
        return MultiTurnLossMaskGenerator(self.tokenizer, self._loss_mask_type, self._template_kwargs)

    @functools.cached_property
    def _ends(self) -> set[int | None]:
        folder = self.tokenizer.name_or_path
        return {self.tokenizer.eos_token_id, *(read_end_tokens(folder) if folder else ())}
