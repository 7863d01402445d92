"""Segments: the conversations of a session, each with the tokens that were asked and sampled for it.

    request 1   system, user                                  segment 1 begins: its prompt is rendered
    request 2   system, user, assistant 1, tool               segment 1 goes on: the tool's message is appended, mask 0
    request 3   system, a summary                             the agent rewrote its history: segment 2 begins
    request 4   system, user, assistant 1, tool, assistant 2, user      segment 1 goes on

A segment becomes a sample. The tokens of its turns are those that were sampled: what the assistant says in a request is
compared with what was recorded, and never tokenized.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fusionrl.data.chat import tokens_after_assistant
from fusionrl.data.prompts import PromptColumns, render_prompt
from fusionrl.data.sample import Sample
from fusionrl.rollout.agent import spelled_out
from fusionrl.rollout.sessions.messages import Message, objects, same

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLLOWS = ("user", "tool", "system")  # who may speak after the model and leave the conversation the same
_GUARDED = ("user", "tool")  # who may have written special tokens that are not theirs to write


@dataclass
class Segment:
    """A conversation that was answered at least once.

    sample     its tokens, masks, log-probs and versions
    messages   what its tokens stand for; the last one is the model's
    end_token  by which the last turn ended; None where a stop string or a limit did
    is_busy    a request goes on from it just now
    """

    sample: Sample
    messages: list[Message]
    tools: list[Message]
    end_token: int | None = None
    num_turns: int = 0
    is_busy: bool = False


@dataclass
class Segments:
    """The segments of a session, the one that was answered last at the end.

    blank            the sample before anything was generated
    template_kwargs  of the chat template
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, object]
    blank: Sample
    all: list[Segment] = field(default_factory=list)

    def continued_by(self, messages: Sequence[Message], tools: Sequence[Message]) -> Segment | None:
        """Return the longest segment from which `messages` go on; None where the agent tells another history.

        One that is being answered is none: a second request at the same time has a history of its own.
        """
        found: Segment | None = None
        for one in self.all:
            done = len(one.messages)
            goes_on = not one.is_busy and len(messages) > done and one.tools == tools
            goes_on = goes_on and all(message["role"] in FOLLOWS for message in messages[done:])
            if goes_on and same(messages[:done], one.messages) and (found is None or done > len(found.messages)):
                found = one
        return found

    def added(self, segment: Segment, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of what is new in `messages`, from the end of the last turn to the next turn.

        Raises:
            ValueError: the chat template cannot render it after a turn of the assistant.
        """
        names = {call["id"]: _name(call) for call in objects(segment.messages[-1].get("tool_calls") or [], "")}
        new = [self._guarded(message) for message in messages[len(segment.messages) :]]
        for message in new:
            if message["role"] == "tool":
                message["name"] = names.get(message["tool_call_id"], "tool")
        return tokens_after_assistant(
            new,
            self.tokenizer,
            end_token=segment.end_token,
            template_kwargs=self.template_kwargs,
            tools=segment.tools or None,
        )

    def begun(self, messages: Sequence[Message], tools: Sequence[Message]) -> Sample:
        """Return a sample whose prompt is `messages`.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        sample = copy.deepcopy(self.blank)
        columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=dict(self.template_kwargs))
        guarded = [self._guarded(message) for message in messages]
        sample.prompt = render_prompt(guarded, self.tokenizer, columns, list(tools) or None)
        sample.prompt_tokens = None
        sample.tokens = np.asarray(self.tokenizer.encode(sample.prompt, add_special_tokens=False), np.int32)
        return sample

    def _guarded(self, message: Message) -> Message:
        """Return a copy in which a tool's answer, say, cannot end its own turn and speak as somebody else."""
        if message["role"] not in _GUARDED:
            return dict(message)
        return {**message, "content": spelled_out(self.tokenizer, str(message["content"]))}

    def keep(self, segment: Segment) -> None:
        """Put a segment that was answered just now at the end."""
        if segment in self.all:
            self.all.remove(segment)
        self.all.append(segment)


def _name(call: Mapping[str, object]) -> object:
    function = call["function"]
    return function["name"] if isinstance(function, dict) else "tool"
