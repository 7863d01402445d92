"""Loss masks of conversations: what the assistant says and its end marker, whatever the template is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusionrl.data.chat import conversation_to_sample
from tests.tiny_model import CHAT_TEMPLATE, make_byte_tokenizer

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No special tokens at all: a turn ends with a blank line.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Qwen3's: the thoughts of earlier turns are taken out again once a new question has come.
STRIPS_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens every answer with a thought that the conversation's own answers do not have.
OPENS_A_THOUGHT = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


def tokenizer_with(template: str) -> Any:
    tokenizer = make_byte_tokenizer()
    if "eot_id" in template:
        markers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": markers})
        tokenizer.eos_token = "<|eot_id|>"
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def masked_runs(sample: Any, tokenizer: Any) -> list[str]:
    """Decoded text of each run of trained tokens."""
    mask = np.concatenate([np.zeros(sample.prompt_length, int), np.asarray(sample.loss_mask)])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(sample.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHAT_TEMPLATE, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (PLAIN, "\n\n")],
    ids=["chatml", "llama3", "plain"],
)
@pytest.mark.parametrize(
    "contents",
    [("S", "U", "A one"), ("S", "U1", "A1", "U2 é", "A2 ü\nmore", "U3", "A3")],
    ids=["single", "multi"],
)
def test_exactly_the_assistants_words_are_trained(template: str, end: str, contents: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(template)
    messages = turns(*contents)
    sample = conversation_to_sample(messages, tokenizer)
    assert masked_runs(sample, tokenizer) == [text + end for text in contents[2::2]]
    # The response begins with the first assistant turn, and the text is that of the template.
    assert sample.loss_mask is not None
    assert sample.loss_mask[0] == 1
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(tokenizer.decode(sample.tokens))
    assert whole.strip() == tokenizer.decode(sample.tokens).strip()
    # At inference the engine sees these very ids as the prompt.
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(prompt, add_special_tokens=False) == list(sample.tokens[: sample.prompt_length])


def test_a_conversation_that_ends_with_the_user() -> None:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    sample = conversation_to_sample(turns("S", "U", "A", "and?"), tokenizer)
    assert masked_runs(sample, tokenizer) == ["A<|im_end|>"]


@pytest.mark.parametrize("template", [STRIPS_HISTORY, OPENS_A_THOUGHT], ids=["strips", "opens"])
def test_a_template_that_rewrites_turns_is_refused(template: str) -> None:
    messages = turns("S", "U1", "<think>hm</think>A1", "U2", "<think>ha</think>A2")
    with pytest.raises(ValueError, match="does not render turns one after another"):
        conversation_to_sample(messages, tokenizer_with(template))


def test_one_turn_of_a_history_stripping_template_is_fine() -> None:
    """Nothing is rewritten while there is one answer: the thought is trained on."""
    tokenizer = tokenizer_with(STRIPS_HISTORY)
    sample = conversation_to_sample(turns("S", "U1", "<think>hm</think>A1"), tokenizer)
    assert masked_runs(sample, tokenizer) == ["<think>hm</think>A1<|im_end|>"]


def test_template_arguments_reach_the_template() -> None:
    tokenizer = tokenizer_with(
        "{% if loud %}!{% endif %}{% if tools %}{{ tools[0]['name'] }}{% endif %}" + CHAT_TEMPLATE
    )
    sample = conversation_to_sample(
        turns("S", "U", "A"), tokenizer, template_kwargs={"loud": True}, tools=[{"name": "T"}]
    )
    assert tokenizer.decode(sample.tokens).startswith("!T<|im_start|>system")


def test_no_assistant_turn() -> None:
    with pytest.raises(ValueError, match="no assistant turn"):
        conversation_to_sample(turns("S", "U"), tokenizer_with(CHAT_TEMPLATE))
