"""Conversations for supervised training: token ids, and a mask of what the assistant said.

The mask comes from the chat template itself: the conversation up to an assistant's turn (with the generation
prompt) must be a prefix of the conversation with it, and what is added is that turn. This holds for any template
that renders turns one after another; where it does not, the conversation is an error, never a wrong mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusionrl.data.sample import Sample, Status


def conversation_to_sample(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    *,
    template_kwargs: dict[str, Any] | None = None,
    tools: Any = None,
) -> Sample:
    """Tokenize a conversation; the response begins at the first assistant turn, its mask is 1 on assistants' tokens.

    Raises:
        ValueError: no assistant turn, or a template that does not render turns one after another.
    """
    kwargs = dict(template_kwargs or {}, tools=tools, tokenize=False)
    if not any(message.get("role") == "assistant" for message in messages):
        raise ValueError("the conversation has no assistant turn to train on")
    ends = tuple(tokenizer.all_special_tokens)
    spans: list[tuple[str, bool]] = []
    done = ""
    for position, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:position], add_generation_prompt=True, **kwargs)
        upto = tokenizer.apply_chat_template(messages[: position + 1], add_generation_prompt=False, **kwargs)
        if not before.startswith(done) or not upto.startswith(before):
            raise ValueError("the chat template does not render turns one after another; no loss mask can be made")
        turn = upto[len(before) :]
        # What a template puts behind the end marker (ChatML: a line break) is never generated, so not trained on.
        if turn.rstrip().endswith(ends):
            turn = turn.rstrip()
        spans += [(before[len(done) :], False), (turn, True)]
        done = before + turn
    tokens: list[int] = []
    mask: list[int] = []
    for text, trained in spans:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [int(trained)] * len(ids)
    prompt_length = mask.index(1) if 1 in mask else len(mask)
    sample = Sample(
        prompt=messages,
        tokens=np.asarray(tokens, np.int32),
        response_length=len(tokens) - prompt_length,
        loss_mask=np.asarray(mask[prompt_length:], np.int32),
        reward=0.0,
        status=Status.COMPLETED,
    )
    sample.validate()
    return sample
