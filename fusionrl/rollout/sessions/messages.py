"""Messages of requests: the form that chat templates read, and when two conversations are the same.

Both protocols are read into the messages and tools of OpenAI's chat completions, with the arguments of calls as
objects, because templates write them as JSON themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusionrl.data.image_rows import IMAGE_PARTS, image_value
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef
from fusionrl.data.render import THOUGHTS, decoded

Message = dict[str, object]

ROLES = ("system", "user", "assistant", "tool")
# What servers of models take beyond the protocols; sampling of tokens that are trained on is the run's.
MORE_SAMPLING = "top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos"
NO_GRAMMAR = "a grammar would change what the model samples"
GRAMMARS = "regex ebnf json_schema guided_json guided_regex guided_choice guided_grammar structured_outputs"


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn of the model.

    longest      tokens of the turn, at most; None: the run's limit
    stop         strings that end the turn, in addition to the run's
    reads_calls  whether calls of tools are looked for in the answer
    ignored      sampling arguments that the run's flags decide
    constraints  what would change the model's sampling (a grammar, a forced call), in words that begin with its name
    template     keyword arguments of the chat template
    thinks       whether the model shall think; this wish and the next two choose arguments of the chat template, see
                 `Segments.template_of`; None: no wish
    effort       "none", "minimal", "low", "medium", "high" or the like
    verbosity    "low", "medium" or "high"
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
    thinks: bool | None = None
    effort: str | None = None
    verbosity: str | None = None


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

    @property
    def known(self) -> set[str]:
        return {*" ".join((self.taken, self.sampling, self.bookkeeping, self.grammars)).split(), *self.refused}


class Body:
    """The JSON object of a request; a method raises `Refused` where a field does not fit.

    ignored, constraints  as in `TurnRequest`; reading adds to them
    """

    def __init__(self, fields: Fields, values: Mapping[str, object]) -> None:
        """Refuse a field that would be ignored although it asks for something."""
        self.values = {name: value for name, value in values.items() if value is not None}
        known = fields.known
        for name, value in self.values.items():
            if name not in known:
                raise Refused(f"{name}: no such field is known; docs/guides/agents.md lists those that are")
            if name in fields.refused and value not in (False, [], {}):
                raise Refused(f"{name}: {fields.refused[name]}", code=fields.codes.get(name))
        self.ignored = [name for name in self.values if name in fields.sampling.split()]
        self.constraints = [f"{name}: {NO_GRAMMAR}" for name in self.values if name in fields.grammars.split()]

    def get(self, name: str) -> object:
        """Return a field as it is; None: not given."""
        return self.values.get(name)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return strings that are given as one or as a list."""
        value = self.values.get(name, [])
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise Refused(f"{name} is {value!r:.80}; strings are wanted")
        return tuple(items)

    def limit(self, name: str) -> int | None:
        """Return a number of tokens, at least 1; None where none is given."""
        value = self.values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise Refused(f"{name} is {value!r}; a whole number of at least 1 is wanted")
        return value

    def mapping(self, name: str, known: str | None = None) -> Mapping[str, object]:
        """Return a field that is an object, with its `known` fields (None: any); empty where there is none."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise Refused(f"{name} is {value!r:.80}; an object is wanted")
        for key, item in value.items():
            if known is not None and item is not None and key not in known.split():
                raise Refused(f"{name}.{key}: no such field is known; known are {known}")
        return value

    def objects(self, name: str) -> list[Mapping[str, object]]:
        """Return a field that is a list of objects; empty where there is none."""
        return objects(self.values.get(name) or [], name)

    def reads_calls(self, choice: object) -> bool:
        """Return whether calls of tools are looked for: "auto", "none", or something that forces one."""
        if choice not in (None, "auto", "none"):
            self.constraints.append(f"tool_choice {choice!r:.80}: the model is free to call tools; use auto or none")
        return choice != "none"

    def check_several_calls(self, name: str, value: object) -> None:
        """Note the constraint of a request that allows one call of a tool at most."""
        if value not in (None, True):
            self.constraints.append(f"{name}: the model is free to call several tools")

    def check_form(self, name: str, form: object) -> None:
        """Note the constraint of an answer's form, unless it is text."""
        if form and not (isinstance(form, dict) and form.get("type") == "text"):
            self.constraints.append(f"{name} {form!r:.80}: {NO_GRAMMAR}")

    def check_strict(self, functions: Sequence[Mapping[str, object]]) -> None:
        """Note what is ignored of tools: a server that honours `strict` samples the arguments by a grammar."""
        if any(function.get("strict") for function in functions):
            self.ignored.append("tools.strict")

    def turn_request(self, messages: list[Message], tools: list[Message], **more: Any) -> TurnRequest:
        """Return the request for a turn after `messages`, which the model can answer."""
        if not messages:
            raise Refused("messages is empty")
        if messages[-1]["role"] == "assistant":
            raise Refused(
                "the last message is the assistant's; a turn that the agent started for the model cannot be trained on"
            )
        return TurnRequest(
            messages,
            tools,
            model=str(self.get("model") or ""),
            is_stream=bool(self.get("stream")),
            ignored=tuple(self.ignored),
            constraints=tuple(self.constraints),
            template=self.mapping("chat_template_kwargs"),
            **more,
        )


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TurnReply:
    """The model's answer."""

    text: str
    calls: tuple[Call, ...]
    finish: str  # "stop", "length" or "tool_calls"
    stop_string: str | None  # of the request, where one ended the turn
    num_prompt_tokens: int
    num_cached: int
    num_sampled: int

    def message(self) -> Message:
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
    return len(first) == len(second) and all(_essence(a) == _essence(b) for a, b in zip(first, second, strict=True))


def _essence(message: Message) -> tuple[object, ...]:
    content = str(message.get("content") or "")
    calls = [(call.get("id"), call.get("function")) for call in objects(message.get("tool_calls") or [], "tool_calls")]
    more = [message.get("tool_call_id"), *(message.get(key) for key in THOUGHTS), message.get("refusal")]
    if message["role"] == "assistant":
        return message["role"], content.strip(), calls, more
    return message["role"], content, calls, [*more, message.get("name")]


def named_event(kind: str, value: Message) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n".encode()


# ------------------------------------------------------------------------------------------------ reading
def content_of(content: object, role: object) -> str | list[Message]:
    """Return the content of a message: a string, or several parts of text and images, which chat templates join.

    Parts of the assistant's text are joined as they were sampled. Raises Refused for sounds and files.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    field = f"the content of a message of {role}"
    parts: list[Message] = []
    for part in objects(content, field):
        if role != "assistant" and (image := image_part(part, field)) is not None:
            parts.append(image)
        elif part.get("type") in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise Refused(f"{field} holds a part of type {part.get('type')!r}; it cannot be rendered")
    if role == "assistant" or (len(parts) < 2 and not any("image" in part for part in parts)):
        return "".join(str(part["text"]) for part in parts)
    return parts


def function_of(name: str, description: object, parameters: object) -> Message:
    """Return a tool as templates and parsers of calls read it; without parameters, one that takes none."""
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(description, str | None) or not isinstance(schema, dict):
        raise Refused(f"the tool {name!r} wants a description in words and parameters as a JSON schema")
    description_entry = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **description_entry, "parameters": schema}}


def openai_tool(tool: Mapping[str, object], function: object) -> Message:
    """Return a tool of OpenAI's protocols; `function` is the part of it that has the name and the parameters."""
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"a tool of type {tool.get('type')!r}; only functions with a name and parameters can be called")
    return function_of(function["name"], function.get("description"), function.get("parameters"))


def objects(value: object, field: str) -> list[Mapping[str, object]]:
    """Return a list of JSON objects. Raises Refused if it is none."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{field} is no list of objects")
    return value


def text_of(values: Mapping[str, object], name: str) -> str | None:
    """Return a field that is text; None where it is empty. Raises Refused if it is something else."""
    value = values.get(name) or None
    if not isinstance(value, str | None):
        raise Refused(f"{name} is {value!r:.80}; text is wanted")
    return value


class Refused(Exception):
    """A request that gets an error in its protocol's form.

    status  of HTTP. Clients send a request again after 408, 409, 429 and 5xx, and after no other
    code    as OpenAI names it, "context_length_exceeded" say
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def image_part(part: Mapping[str, object], where: str) -> Message | None:
    """Return a part that is an image, with its `data:` URI; None for another part.

    where  the field, for messages

    Raises:
        Refused: the image itself is not in the request.
    """
    if part.get("type") not in IMAGE_PARTS:
        return None
    uri = image_value(part)
    if not isinstance(uri, str) or not uri.startswith("data:"):
        told = uri if isinstance(uri, str) else uri or dict(part)
        raise Refused(f"{where} holds the image {told!s:.80}: nothing is fetched here; send it in base64")
    return {"type": "image", "image": uri}


@dataclass
class Pictures:
    """The images of a session, by hashes of their `data:` URIs, which have megabytes."""

    _known: dict[bytes, ImageRef] = field(default_factory=dict)

    def taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with references in place of `data:` URIs.

        Raises:
            Refused: the model gets no images, or one cannot be read.
        """
        return [
            {**message, "content": [self._taken(part) for part in content]}
            if isinstance(content := message["content"], list)
            else message
            for message in messages
        ]

    def _taken(self, part: Message) -> Message:
        uri = part.get("image")
        if not isinstance(uri, str):
            return part
        if IMAGES.processor is None:
            raise Refused("a message holds an image, and the model here reads text alone (--multimodal-keys)")
        from fusionrl.data.processor import as_ref

        try:
            key = hashlib.sha256(uri.encode()).digest()
            if key not in self._known:
                self._known[key] = as_ref(uri, IMAGES.processor)
        except ValueError as error:
            raise Refused(f"an image in a message cannot be used: {error}") from error
        return {"type": "image", "image": self._known[key]}


def images_of(messages: Sequence[Message]) -> list[ImageRef]:
    """Return the images of messages, in order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [image for part in parts if isinstance(image := part.get("image"), ImageRef)]


def without_data(message: Message) -> Message:
    """Return a message as chat templates read it: an image is a part without data."""
    content = message["content"]
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [{"type": "image"} if "image" in part else part for part in content]}
