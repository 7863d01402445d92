"""Segments: the conversations of a session, each with its prompt's tokens and the sampled ones.

    request 1   system, user                                  segment 1 begins: its prompt is rendered
    request 2   system, user, assistant 1, tool               segment 1 continues: the tool's text is appended, mask 0
    request 3   system, a summary                             the agent rewrote its history: segment 2 begins
    request 4   system, user, assistant 1, tool, assistant 2, user      segment 1 continues

A segment becomes a sample. The tokens of its turns are those that were sampled: what the assistant says in a request is
compared with what was recorded, and never tokenized.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusionrl.data.chat import tokens_after_assistant
from fusionrl.data.findings import FindingError
from fusionrl.data.images import Expanded
from fusionrl.data.prompts import PromptColumns, render_prompt
from fusionrl.data.render import render_messages
from fusionrl.data.sample import Sample
from fusionrl.rollout.agent import spelled_out
from fusionrl.rollout.image_requests import with_images
from fusionrl.rollout.sessions.messages import Message, TurnRequest, objects, same
from fusionrl.rollout.sessions.pictures import images_of, without_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLLOWS = ("user", "tool", "system")  # who may speak after the model and leave the conversation the same
_GUARDED = ("user", "tool")  # who may have written special tokens that are not theirs to write


@dataclass
class Segment:
    """A conversation that was answered at least once.

    sample     its tokens, masks, log-probs and versions
    messages   the conversation in its tokens; the last one is the model's
    template   keyword arguments of the chat template
    end_token  by which the last turn ended; None where a stop string or a limit did
    is_busy    a request is continuing it now
    """

    sample: Sample
    messages: list[Message]
    tools: list[Message]
    template: Mapping[str, object] = field(default_factory=dict)
    end_token: int | None = None
    num_turns: int = 0
    is_busy: bool = False


@dataclass
class Segments:
    """The segments of a session, the one that was answered last at the end.

    blank            the sample before anything was generated
    template_kwargs  of the chat template, where a request has none of its own
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, object]
    blank: Sample
    all: list[Segment] = field(default_factory=list)

    def template_of(self, request: TurnRequest) -> Mapping[str, object]:
        """Return the keyword arguments of the chat template for a request.

        Whether a model thinks is `enable_thinking` in templates of Qwen and others, `thinking` in DeepSeek's; how much,
        `reasoning_effort` in those of GPT-OSS. Raises ValueError if the template has no argument for a wish of the
        request.
        """
        kwargs = {**self.template_kwargs, **request.template}
        wishes = request.switches
        thinks = wishes.thinks
        if wishes.effort is not None and self._reads("reasoning_effort", "low", "high"):
            kwargs["reasoning_effort"] = wishes.effort
        elif wishes.effort is not None and thinks is None:
            thinks = wishes.effort != "none"
        if thinks is not None:
            switch = next((name for name in ("enable_thinking", "thinking") if self._reads(name, True, False)), None)
            if switch is None:
                raise ValueError(
                    f"the chat template has no argument that switches thoughts {'on' if thinks else 'off'}"
                    " (enable_thinking, thinking, reasoning_effort): leave out thinking, effort and reasoning_effort"
                )
            kwargs[switch] = thinks
        if wishes.verbosity is not None:
            if not self._reads("verbosity", "low", "high"):
                raise ValueError("the chat template has no argument verbosity: leave it out")
            kwargs["verbosity"] = wishes.verbosity
        return kwargs

    def _reads(self, name: str, first: object, second: object) -> bool:
        """Return whether another value of an argument makes the chat template render otherwise, or refuse."""
        probe = [{"role": "user", "content": "?"}]

        def text(kwargs: Mapping[str, object]) -> str:
            try:
                return render_messages(
                    self.tokenizer, probe, template_kwargs=kwargs, for_answer=True, may_lose=None
                ).text
            except FindingError:
                return "refused"

        return text({**self.template_kwargs, name: first}) != text({**self.template_kwargs, name: second})

    def continued_by(self, turn_request: TurnRequest, template: Mapping[str, object]) -> Segment | None:
        """Return the longest segment that a request continues; None where the agent tells another history.

        Other tools, or other arguments of the template, are another history, too: the beginning is rendered otherwise.
        One that is being answered is none: a second request at the same time has a history of its own.
        """
        messages = turn_request.messages
        longest: Segment | None = None
        for segment in self.all:
            done = len(segment.messages)
            goes_on = not segment.is_busy and len(messages) > done
            goes_on = goes_on and segment.tools == turn_request.tools and segment.template == template
            goes_on = goes_on and all(message["role"] in FOLLOWS for message in messages[done:])
            if (
                goes_on
                and same(messages[:done], segment.messages)
                and (longest is None or done > len(longest.messages))
            ):
                longest = segment
        return longest

    def added(self, segment: Segment, messages: Sequence[Message]) -> tuple[Expanded, str]:
        """Return the tokens of what is new in `messages`, from the end of the last turn to the next turn, and the text.

        Raises ValueError if the chat template cannot render it after a turn of the assistant.
        """
        names = {call["id"]: _name(call) for call in objects(segment.messages[-1].get("tool_calls") or [], "")}
        said = messages[len(segment.messages) :]
        new = [self._guarded(message) for message in said]
        for message in new:
            if message["role"] == "tool":
                message["name"] = names.get(message["tool_call_id"], "tool")
        tokens = tokens_after_assistant(
            new,
            self.tokenizer,
            end_token=segment.end_token,
            template_kwargs=segment.template,
            tools=segment.tools or None,
        )
        whole = with_images(tokens, images_of(said), segment.sample.num_tokens)
        return whole, self.tokenizer.decode(tokens)

    def begun(self, turn_request: TurnRequest, template: Mapping[str, object]) -> Sample:
        """Return a sample whose prompt is what a request asks.

        Raises ValueError if the tokenizer has no chat template, or it refuses the messages.
        """
        sample = copy.deepcopy(self.blank)
        columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=dict(template))
        guarded = [self._guarded(message) for message in turn_request.messages]
        sample.prompt = render_prompt(guarded, self.tokenizer, columns, turn_request.tools or None)
        sample.prompt_tokens = None
        tokens = self.tokenizer.encode(sample.prompt, add_special_tokens=False)
        whole = with_images(tokens, images_of(turn_request.messages))
        sample.tokens, sample.image_spans, sample.multimodal_inputs = whole.ids, whole.spans, None
        return sample

    def _guarded(self, message: Message) -> Message:
        """Return a copy in which a tool's answer, say, cannot end its own turn and speak in another role."""
        message = without_data(message)
        if message["role"] not in _GUARDED:
            return message
        content = message["content"]
        if isinstance(content, list):
            return {**message, "content": [self._guarded_part(part) for part in content]}
        return {**message, "content": spelled_out(self.tokenizer, str(content))}

    def _guarded_part(self, part: Message) -> Message:
        return {**part, "text": spelled_out(self.tokenizer, str(part["text"]))} if "text" in part else part

    def keep(self, segment: Segment) -> None:
        """Put a segment that was answered just now at the end."""
        if segment in self.all:
            self.all.remove(segment)
        self.all.append(segment)


def _name(call: Mapping[str, object]) -> object:
    function = call["function"]
    return function["name"] if isinstance(function, dict) else "tool"
