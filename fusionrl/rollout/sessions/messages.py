"""Messages of requests: the form that chat templates read, and when two conversations are the same.

Both protocols are read into the messages and tools of OpenAI's chat completions, with contents as text and with the
arguments of calls as objects, because templates write them as JSON themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")


class Refused(Exception):
    """A request that gets an error in its protocol's form.

    status  of HTTP. Clients send a request again after 408, 409, 429 and 5xx, and after no other
    code    as OpenAI names it, "context_length_exceeded" say
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Asked:
    """A request for one turn of the model.

    longest      tokens of the turn, at most; None: the run's limit
    stop         strings that end the turn, besides the run's
    reads_calls  whether calls of tools are looked for in the answer
    ignored      sampling arguments that the run's flags decide
    """

    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    longest: int | None = None
    stop: tuple[str, ...] = ()
    reads_calls: bool = True
    model: str = ""
    is_stream: bool = False
    wants_usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """What the model answered.

    finish       "stop", "length" or "tool_calls"
    stop_string  of the request, where one ended the turn
    """

    text: str
    calls: tuple[Call, ...]
    finish: str
    stop_string: str | None
    num_asked: int
    num_cached: int
    num_sampled: int

    def message(self) -> Message:
        """The message that stands for it in the conversation."""
        made: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            made["tool_calls"] = [call_message(call.id, call.name, call.arguments) for call in self.calls]
        return made


def call_message(call_id: str, name: str, arguments: object) -> Message:
    """Return a call as templates read it; `arguments` may be JSON or an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            pass  # a call that another model wrote: it stays text
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def same(first: Sequence[Message], second: Sequence[Message]) -> bool:
    """Return whether two conversations say the same.

    White space around what the assistant said does not count, nor do fields that no template renders.
    """
    return len(first) == len(second) and all(map(_same_message, first, second))


def _same_message(first: Message, second: Message) -> bool:
    return _essence(first) == _essence(second)


def _essence(message: Message) -> tuple[object, ...]:
    content = str(message.get("content") or "")
    calls = [(call.get("id"), call.get("function")) for call in objects(message.get("tool_calls") or [], "tool_calls")]
    said = content.strip() if message["role"] == "assistant" else content
    return message["role"], said, calls, message.get("tool_call_id")


# ------------------------------------------------------------------------------------------------ reading
def content_of(content: object, role: object) -> str:
    """Return the text of a message's content: a string, or a list of parts of text.

    Parts of others are lines of their own; what the assistant said is joined as it was sampled.

    Raises:
        Refused: pictures, sounds and files, of which the models here know nothing; or no content at all.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    what = f"the content of a message of {role}"
    parts = []
    for part in objects(content, what):
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise Refused(f"{what} holds a part of type {part.get('type')!r}; only text can be rendered")
        parts.append(str(part["text"]))
    return ("" if role == "assistant" else "\n").join(parts)


def function_of(name: str, description: object, parameters: object) -> Message:
    """Return a tool as templates and parsers of calls read it; without parameters, one that takes none.

    Raises:
        Refused: a description that is no text, or parameters that are no JSON schema of an object.
    """
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(description, str | None) or not isinstance(schema, dict):
        raise Refused(f"the tool {name!r} wants a description in words and parameters as a JSON schema")
    told = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def objects(value: object, what: str) -> list[Mapping[str, object]]:
    """Return a list of JSON objects.

    Raises:
        Refused: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Refused(f"{what} is no list of objects")
    return value


def whole_number(value: object, what: str) -> int | None:
    """Return a limit of at least 1; None where none is given.

    Raises:
        Refused: it is no such number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{what} is {value!r}; a whole number of at least 1 is wanted")
    return value


def texts(value: object, what: str) -> tuple[str, ...]:
    """Return strings that are given as one or as a list.

    Raises:
        Refused: something else, or an empty string.
    """
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise Refused(f"{what} is {value!r:.80}; strings are wanted")
    return tuple(found)


def checked(messages: list[Message]) -> list[Message]:
    """Return messages that can be answered.

    Raises:
        Refused: there are none, or the last one is the assistant's: what it said is not gone on with.
    """
    if not messages:
        raise Refused("messages is empty")
    if messages[-1]["role"] == "assistant":
        raise Refused("the last message is the assistant's; a turn that was begun for the model cannot be trained on")
    return messages
