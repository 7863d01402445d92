"""Samples of supervised training: conversations with their loss masks, texts with responses, and rows of tokens.

Tokens of a conversation are those of the chat template's rendering of all of it. Each way of `LOSS_MASK_TYPES` finds
the assistant's turns in that text, and each turn is looked up in what was found: where the text of a turn is not where
a way says it is, the conversation is an error, never a wrong mask.

Rows of token ids and a loss mask are trained on exactly as they stand. `--mode reject-sampling` writes them where text
alone would lose which tokens the model sampled: answers of several turns, with a tool's text between them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fusionrl.data.columns import LOSS_MASK, TOKENS
from fusionrl.data.findings import Finding, FindingError
from fusionrl.data.images import ImageRef, collapsed, expanded
from fusionrl.data.render import STEP_LOSS_MASK, WEIGHT, Rendered, call_template, objects, render_messages
from fusionrl.data.sample import Sample, Status, response_mask
from fusionrl.data.tokenizer import read_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LARGEST_ID = int(np.iinfo(np.int32).max)


def token_columns(sample: Sample) -> dict[str, np.ndarray]:
    """Return both columns of a sample: the mask runs over all tokens, and is 0 on the prompt's. An image has one token.

    Raises ValueError: the sample's fields do not fit together.
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

    Raises ValueError: nothing to train on, or no right mask can be made (see `get_loss_mask`).
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

    Raises ValueError: another number of placeholders than of images, or an image that is to be trained on.
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
    """Makes samples with their loss masks."""

    tokenizer: PreTrainedTokenizerBase
    loss_mask_type: str = "auto"  # one of LOSS_MASK_TYPES, for conversations
    template_kwargs: Mapping[str, object] | None = None  # keyword arguments of the chat template

    def make(self, prompt: object, label: object, tools: object = None) -> Sample:
        """Return the sample of a row: a list of messages, or text with its response.

        Raises ValueError: a conversation that nothing can be trained on or no right mask can be made of, or a text
        prompt without a text label.
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


Span = tuple[int, int]  # characters of the rendered conversation, the end excluded


@dataclass(frozen=True)
class Marks:
    """The text before and after each turn of the assistant. The end is generated too, so it is trained on."""

    header: str
    ends: tuple[str, ...]


_CHATML = Marks("<|im_start|>assistant\n", ("<|im_end|>",))
# Qwen's models all speak ChatML; that a template drops thoughts of earlier turns matters not, for marks are looked
# for in the rendering of the whole conversation.
MARKS: dict[str, Marks] = {
    "chatml": _CHATML,
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3_5": _CHATML,
    "llama3": Marks("<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>", "<|eom_id|>")),
    "distill_qwen": Marks("<｜Assistant｜>", ("<｜end▁of▁sentence｜>",)),
}
LOSS_MASK_TYPES = ("auto", *MARKS, "prefix", "template")


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of each mask from its first 1 on; 0 for a mask without one."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations, under slime's names.

    tokenizer_type  one of LOSS_MASK_TYPES:
        a name of MARKS  a turn is what stands between the template's header and end marker of the assistant
        template         what the template itself puts between {% generation %} and {% endgeneration %}, less a header
                         and a line break behind the end marker, where these stand between them
        prefix           any template that renders turns one after another: what a turn adds to the rendering of the
                         turns before it, the generation prompt included
        auto             the marks, where the template's generation prompt has a known header; `template` where the
                         template has such blocks; else `prefix`
    template_kwargs  keyword arguments of the chat template, as the engines use them. Text that the generation prompt
                     then has behind the header (Qwen3, enable_thinking false: an empty thought) is not trained on.

    Raises ValueError: an unknown type, or a tokenizer that has no chat template or gives no character offsets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_type: str = "auto",
        template_kwargs: Mapping[str, object] | None = None,
    ):
        if tokenizer_type not in LOSS_MASK_TYPES:
            known = ", ".join(LOSS_MASK_TYPES)
            raise ValueError(f"--loss-mask-type {tokenizer_type}: unknown; known are {known}")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("conversations need a chat template; the tokenizer of --hf-checkpoint has none")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("loss masks need a fast tokenizer (tokenizer.json): others do not say where tokens stand")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.generation_prompt = self._generation_prompt()
        self.tokenizer_type = self._detect() if tokenizer_type == "auto" else tokenizer_type

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, object]], tools: object = None
    ) -> tuple[list[int], list[int]]:
        """Token ids [T] of the whole conversation, and a mask [T]: 1 on what the assistant generates in it.

        That is the content, thoughts that the template keeps, tool calls and the end marker; not the header, and not
        a line break behind the marker. A turn whose message has `step_loss_mask: 0` or `weight: 0` is 0 throughout.

        Raises ValueError: no assistant turn, a `step_loss_mask` or `weight` that is neither 0 nor 1, a template that
        leaves a field out, or one for which this way gives no right mask.
        """
        are_trained = [is_trained(message) for message in messages if message.get("role") == "assistant"]
        if not are_trained:
            raise ValueError("the conversation has no assistant turn to train on")
        rendered = self._render(messages, tools)
        text, turns = rendered.text, [message for message in rendered.messages if message["role"] == "assistant"]
        if self.tokenizer_type == "template":
            spans = self._template_spans(rendered)
        elif self.tokenizer_type == "prefix":
            spans = self._prefix_spans(rendered)
        else:
            spans = self._marked_spans(text, MARKS[self.tokenizer_type])
        if len(spans) != len(turns):
            self._refuse(
                "the turns of the assistant are not those in the rendered text",
                f"{len(turns)} in the messages, {len(spans)} in the text",
            )
        trained = [span for span, is_one in zip(spans, are_trained, strict=True) if is_one]
        for (start, end), turn, is_one in zip(spans, turns, are_trained, strict=True):
            if is_one:
                self._check_turn(text[start:end], _said(turn))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), self._mask_tokens(text, ends, trained)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The decoded text of each run of trained tokens."""
        edges = np.flatnonzero(np.diff([0, *loss_masks, 0]))
        return [self.tokenizer.decode(token_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    get_response_lengths = staticmethod(get_response_lengths)

    # -------------------------------------------------------------------------------- the template
    def _render(self, messages: Sequence[Mapping[str, object]], tools: object = None, prompt: bool = False) -> Rendered:
        kwargs = self.template_kwargs
        return render_messages(self.tokenizer, messages, tools, for_answer=prompt, template_kwargs=kwargs)

    def _generation_prompt(self) -> str:
        probe = [{"role": "user", "content": "?"}]
        without, with_prompt = self._render(probe).text, self._render(probe, prompt=True).text
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _detect(self) -> str:
        for name, marks in MARKS.items():
            if self.generation_prompt.startswith(marks.header):
                return name
        return "template" if self._has_blocks() else "prefix"

    def _has_blocks(self) -> bool:
        return re.search(r"\{%-?\s*generation\b", str(self.tokenizer.chat_template)) is not None

    def _refuse(self, why: str, detail: str = "") -> NoReturn:
        kind = self.tokenizer_type
        cause = f"--loss-mask-type {kind} gives no right loss mask for this conversation and chat template: {why}"
        hint = f"other types are {', '.join(name for name in LOSS_MASK_TYPES if name != kind)}"
        raise FindingError(Finding(cause, detail, hint))

    def _check_turn(self, turn: str, pieces: list[str]) -> None:
        for part in pieces:
            if part not in turn:
                self._refuse("what the assistant said is not in its turn", f"{part[:80]!r} is not in {turn[:80]!r}")
        last = pieces[-1] if pieces else ""
        if pieces and turn.endswith(last):
            self._refuse("no end marker follows a turn, so the model would not learn to stop", repr(last[-80:]))
        end = turn[turn.rindex(last) + len(last) :].strip()
        if end in self.tokenizer.all_special_tokens and last.endswith(end):
            self._refuse("the text of a turn holds the end marker", repr(end))

    # -------------------------------------------------------------------------------- ways to find the turns
    def _marked_spans(self, text: str, marks: Marks) -> list[Span]:
        spans: list[Span] = []
        position = text.find(marks.header)
        while position >= 0:
            opened = self.generation_prompt if self.generation_prompt.startswith(marks.header) else marks.header
            start = position + len(opened if text.startswith(opened, position) else marks.header)
            ends = [(text.find(end, start), end) for end in marks.ends]
            stop, end = min([pair for pair in ends if pair[0] >= 0], default=(-1, ""))
            if stop < 0:
                self._refuse(f"no {' or '.join(marks.ends)} follows a turn", repr(text[start : start + 80]))
            if text.startswith(marks.ends, stop + len(end)):
                self._refuse("the text of a turn holds the end marker", repr(end))
            spans.append((start, stop + len(end)))
            position = text.find(marks.header, spans[-1][1])
        return spans

    def _prefix_spans(self, rendered: Rendered) -> list[Span]:
        text, messages, tools = rendered.text, rendered.messages, rendered.tools
        kwargs = {**self.template_kwargs, "tools": tools, "tokenize": False}
        spans: list[Span] = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if position == 0:
                self._refuse("the conversation begins with the assistant, so it has no prompt")
            # In the spelling of the whole, which was checked.
            render = self.tokenizer.apply_chat_template
            before = call_template(render, messages[:position], add_generation_prompt=True, **kwargs)
            upto = call_template(render, messages[: position + 1], add_generation_prompt=False, **kwargs)
            if not (text.startswith(upto) and upto.startswith(before)):
                self._refuse("the template does not render turns one after another")
            spans.append(self._clip(text, len(before), len(upto)))
        return spans

    def _clip(self, text: str, start: int, stop: int) -> Span:
        """Take off what is never generated: what is left of the generation prompt, white space behind an end marker."""
        prompt, special = self.generation_prompt, tuple(self.tokenizer.all_special_tokens)
        opened = text.rfind(prompt, 0, start + len(prompt))
        if opened >= 0:
            start = max(start, opened + len(prompt))
        if any(prompt.startswith(token) and text.startswith(token, start) for token in special):
            self._refuse("a turn would begin with its header", repr(text[start : start + 80]))
        turn = text[start:stop].rstrip()
        return start, start + len(turn) if turn.endswith(special) else stop

    def _template_spans(self, rendered: Rendered) -> list[Span]:
        if not self._has_blocks():
            self._refuse("the chat template has no {% generation %} blocks")
        from transformers.utils.chat_template_utils import render_jinja_template

        # What return_assistant_tokens_mask is made of: the characters of each block.
        _, blocks = render_jinja_template(
            conversations=[rendered.messages],
            tools=rendered.tools,
            chat_template=self.tokenizer.get_chat_template(tools=rendered.tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
        )
        return [self._clip(rendered.text, start, stop) for start, stop in blocks[0]]

    # -------------------------------------------------------------------------------- characters → tokens
    def _mask_tokens(self, text: str, ends: Sequence[int], spans: list[Span]) -> list[int]:
        """[T]: 1 on the tokens that lie in a span; ends[t] is the character behind token t.

        A token is taken to begin where the one before ends, because tokenizers may leave the spaces out of their
        offsets; several tokens of one character all have that character's end.
        """
        mask: list[int] = []
        remaining = iter([*spans, (len(text), len(text))])
        start, end = next(remaining)
        done = 0
        for stop in ends:
            if stop <= done:
                mask.append(mask[-1] if mask else 0)
                continue
            while end <= done and end < len(text):
                start, end = next(remaining)
            inside = text[max(done, start) : min(stop, end)]
            is_inside = start <= done and stop <= end
            # White space that a token shares with the header or with what follows is not worth an error.
            if inside.strip() and not is_inside:
                self._refuse("a token belongs to the assistant's turn only in part", repr(text[done:stop]))
            mask.append(int(is_inside))
            done = stop
        return mask


def is_trained(message: Mapping[str, object]) -> bool:
    """Return whether the turn of an assistant's message is trained on, by its `step_loss_mask` or `weight`.

    Raises FindingError: one of them is neither 0 nor 1, or they differ.
    """
    values = {key: message[key] for key in (STEP_LOSS_MASK, WEIGHT) if message.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            cause, hint = f"{key} of a message is neither 0 nor 1", "0: the turn is not trained on; 1: it is"
            raise FindingError(Finding(cause, repr(value), hint))
    if len(set(values.values())) > 1:
        raise FindingError(Finding(f"{STEP_LOSS_MASK} and {WEIGHT} of a message differ"))
    return 0 not in values.values()


def _said(message: Mapping[str, object]) -> list[str]:
    """Return the texts that every template must render in the turn: the text after a thought, and names of tools."""
    content = message["content"] or ""
    parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in objects(content)]
    calls = objects(message.get("tool_calls") or [])
    texts = [part.split("</think>")[-1].strip() for part in parts] + [str(call["function"]["name"]) for call in calls]
    return [text for text in texts if text]
