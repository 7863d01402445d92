"""Messages of requests: the form that chat templates read, and when two conversations are the same.

Both protocols are read into the messages and tools of OpenAI's chat completions, with the arguments of calls as
objects, because templates write them as JSON themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionrl.data.render import THOUGHTS, decoded

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")
# What servers of models take beyond the protocols; sampling of tokens that are trained on is the run's.
MORE_SAMPLING = "top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos"
NO_GRAMMAR = "a grammar would change what the model samples"
GRAMMARS = "regex ebnf json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs"


class Refused(Exception):
    """A request that gets an error in its protocol's form.

    status  of HTTP. Clients send a request again after 408, 409, 429 and 5xx, and after no other
    code    as OpenAI names it, "context_length_exceeded" say
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Switches:
    """Wishes that a chat template may have a word for; None: none.

    thinks     whether the model shall think
    effort     "none", "minimal", "low", "medium", "high" or the like
    verbosity  "low", "medium" or "high"
    """

    thinks: bool | None = None
    effort: str | None = None
    verbosity: str | None = None


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn of the model.

    longest      tokens of the turn, at most; None: the run's limit
    stop         strings that end the turn, in addition to the run's
    reads_calls  whether calls of tools are looked for in the answer
    ignored      sampling arguments that the run's flags decide
    constraints  what would change the model's sampling (a grammar, a forced call), in words that begin with its name
    template     keyword arguments of the chat template
    switches     wishes of a protocol's own, for whichever argument of the chat template they mean; see `Segments`
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
    constraints: tuple[str, ...] = ()
    template: Mapping[str, object] = field(default_factory=dict)
    switches: Switches = Switches()


@dataclass(frozen=True)
class Fields:
    """The fields of a protocol's requests, their names separated by spaces; `taken` are those that `read` looks at.

    sampling     decided by the run's flags
    bookkeeping  of billing, caches and logs: no token depends on them
    refused      name → why
    grammars     they would change what the model samples
    codes        name → the error code by which a client knows that it must do without a refused field
    """

    taken: str
    sampling: str
    bookkeeping: str
    refused: Mapping[str, str]
    grammars: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)

    def check(self, body: Mapping[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (ignored, constraints) of a request, as in `TurnRequest`.

        Raises:
            Refused: a field that would be ignored although it asks for something.
        """
        present = {name: value for name, value in body.items() if value is not None}
        known = self.known
        for name, value in present.items():
            if name not in known:
                raise Refused(f"{name}: no such field is known; docs/guides/agents.md lists those that are")
            if name in self.refused and value not in (False, [], {}):
                raise Refused(f"{name}: {self.refused[name]}", code=self.codes.get(name))
        constraints = (f"{name}: {NO_GRAMMAR}" for name in present if name in self.grammars.split())
        return tuple(name for name in present if name in self.sampling.split()), tuple(constraints)

    @property
    def known(self) -> set[str]:
        """All names."""
        return {*" ".join((self.taken, self.sampling, self.bookkeeping, self.grammars)).split(), *self.refused}


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TurnReply:
    """The model's answer.

    finish       "stop", "length" or "tool_calls"
    stop_string  of the request, where one ended the turn
    """

    text: str
    calls: tuple[Call, ...]
    finish: str
    stop_string: str | None
    num_prompt_tokens: int
    num_cached: int
    num_sampled: int

    def message(self) -> Message:
        """Return the answer as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call_message(call.id, call.name, call.arguments) for call in self.calls]
        return message


def call_message(call_id: str, name: str, arguments: object) -> Message:
    """Return a call as templates read it; `arguments` may be JSON or an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": decoded(arguments)}}


def same(first: Sequence[Message], second: Sequence[Message]) -> bool:
    """Return whether two conversations say the same.

    White space around what the assistant said does not count, nor do fields that no template renders, nor a name that
    the agent gives to the model's reply.
    """
    return len(first) == len(second) and all(map(_same_message, first, second))


def _same_message(first: Message, second: Message) -> bool:
    return _essence(first) == _essence(second)


def _essence(message: Message) -> tuple[object, ...]:
    content = str(message.get("content") or "")
    calls = [(call.get("id"), call.get("function")) for call in objects(message.get("tool_calls") or [], "tool_calls")]
    more = [message.get("tool_call_id"), *(message.get(key) for key in THOUGHTS), message.get("refusal")]
    if message["role"] == "assistant":
        return message["role"], content.strip(), calls, more
    return message["role"], content, calls, [*more, message.get("name")]


# ------------------------------------------------------------------------------------------------ reading
def content_of(content: object, role: object) -> str | list[Message]:
    """Return the content of a message: a string, or several parts of text, which chat templates join.

    Parts of the assistant's text are joined as they were sampled.

    Raises:
        Refused: pictures, sounds and files, of which the models here know nothing; or no content at all.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    field = f"the content of a message of {role}"
    parts = []
    for part in objects(content, field):
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise Refused(f"{field} holds a part of type {part.get('type')!r}; only text can be rendered")
        parts.append(str(part["text"]))
    return "".join(parts) if role == "assistant" or len(parts) < 2 else [{"type": "text", "text": p} for p in parts]


def function_of(name: str, description: object, parameters: object) -> Message:
    """Return a tool as templates and parsers of calls read it; without parameters, one that takes none.

    Raises:
        Refused: a description that is not text, or parameters that are not a JSON schema of an object.
    """
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(description, str | None) or not isinstance(schema, dict):
        raise Refused(f"the tool {name!r} wants a description in words and parameters as a JSON schema")
    description_entry = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **description_entry, "parameters": schema}}


def objects(value: object, field: str) -> list[Mapping[str, object]]:
    """Return a list of JSON objects.

    Raises:
        Refused: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{field} is no list of objects")
    return value


def text_of(body: Mapping[str, object], name: str) -> str | None:
    """Return a field that is text; None where it is empty.

    Raises:
        Refused: it is something else.
    """
    value = body.get(name) or None
    if not isinstance(value, str | None):
        raise Refused(f"{name} is {value!r:.80}; text is wanted")
    return value


def choice_of(value: object, name: str) -> tuple[bool, tuple[str, ...]]:
    """Return (whether calls are looked for, constraints) of a tool_choice: "auto", "none", or something that forces."""
    if value in (None, "auto", "none"):
        return value != "none", ()
    return True, (f"{name}: the model is free to call tools or not; use auto or none",)


def form_of(form: object, name: str) -> tuple[str, ...]:
    """Return the constraint of an answer's form, unless it is text."""
    is_text = not form or (isinstance(form, dict) and form.get("type") == "text")
    return () if is_text else (f"{name} {form!r:.80}: {NO_GRAMMAR}",)


def several_calls(value: object, name: str) -> tuple[str, ...]:
    """Return the constraint of a request that allows one call of a tool at most."""
    return () if value in (None, True) else (f"{name}: the model is free to call several tools",)


def strict_of(functions: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """Return what is ignored of tools: a server that honours `strict` samples the arguments by a grammar."""
    return ("tools.strict",) if any(function.get("strict") for function in functions) else ()


def object_of(body: Mapping[str, object], name: str, known: str | None = None) -> Mapping[str, object]:
    """Return a field that is a JSON object; empty where there is none.

    known  the names of its own fields, separated by spaces; None: any

    Raises:
        Refused: it is something else, or has a field that is not known.
    """
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise Refused(f"{name} is {value!r:.80}; an object is wanted")
    for key, item in value.items():
        if known is not None and item is not None and key not in known.split():
            raise Refused(f"{name}.{key}: no such field is known; known are {known}")
    return value


def whole_number(value: object, field: str) -> int | None:
    """Return a limit of at least 1; None where none is given.

    Raises:
        Refused: it is not such a number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{field} is {value!r}; a whole number of at least 1 is wanted")
    return value


def texts(value: object, field: str) -> tuple[str, ...]:
    """Return strings that are given as one or as a list.

    Raises:
        Refused: something else, or an empty string.
    """
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise Refused(f"{field} is {value!r:.80}; strings are wanted")
    return tuple(items)


def checked(messages: list[Message]) -> list[Message]:
    """Return messages that can be answered.

    Raises:
        Refused: there are none, or the last one is the assistant's: it is not continued.
    """
    if not messages:
        raise Refused("messages is empty")
    if messages[-1]["role"] == "assistant":
        raise Refused(
            "the last message is the assistant's; a turn that the agent started for the model cannot be trained on"
        )
    return messages
