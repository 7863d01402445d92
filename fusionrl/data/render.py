"""Render conversations by a chat template: one way for supervised rows, prompts, agents and sessions.

Data sets and clients write one conversation in several spellings: `arguments` of a call as JSON text or as an object,
empty values as `null`, `""` or not at all, a thought as `reasoning_content`, `reasoning` or `thinking`, content as text
or as parts. `normal_form` gives all of them one spelling. Templates read different spellings, too: `render_with` takes
the first of a few that the template renders as a whole. If there is none, the error names the field that is left out.

Text that is trained on must be rendered completely. A prompt may lose what models do without and servers leave out:
thoughts of earlier turns, and content next to calls (`CONTEXT`); that is a warning.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fusionrl.data.findings import Finding, FindingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Messages = Sequence[Mapping[str, object]]
Render = Callable[[list[Message], object], object]  # (messages, tools) → text, by a template

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of one field: templates read one or several of them
# Keys of a message that say whether a turn is trained on: slime's, and that of OpenAI's format for fine-tuning.
LOSS_KEYS = STEP_LOSS_MASK, WEIGHT = "step_loss_mask", "weight"
BESIDE_CALLS, TOOLS = "content beside tool_calls", "tools"
CONTEXT = frozenset({*THOUGHTS, BESIDE_CALLS})
# Words by which users of some models switch thoughts on and off; templates take them out of what was said.
_SWITCHES = re.compile(r"/(?:no_?)?think\b|/system_override\b")
_NO_TOOL = "name_of_no_tool"
_ADVICE = "write it into the content as the model would, take the field out, or take a chat template that renders it"


class Rendered(NamedTuple):
    """Text of a conversation, and the spelling of messages and tools of which the template made it."""

    text: str
    messages: list[Message]
    tools: object
    left_out: Finding | None = None  # a warning that names a field in `may_lose` that is not in the text


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: object = None,
    *,
    for_answer: bool = False,
    template_kwargs: Mapping[str, object] | None = None,
    may_lose: Collection[str] | None = (),
) -> Rendered:
    """Render by a tokenizer's chat template.

    for_answer  end with the header of the assistant's next turn
    may_lose    fields that a rendering may leave out; None: any, and nothing is checked

    Raises:
        FindingError: the template refuses the conversation, or leaves out the tools or a field of a message; names it.
    """
    kwargs = {**(template_kwargs or {}), "tokenize": False, "add_generation_prompt": for_answer}

    def render(conversation: list[Message], tools: object) -> object:
        return tokenizer.apply_chat_template(conversation, tools=tools, **kwargs)

    return render_with(render, messages, tools, tokenizer.name_or_path or "the tokenizer", may_lose=may_lose)


def render_with(
    render: Render,
    messages: Messages,
    tools: object = None,
    name: str = "the model",
    *,
    may_lose: Collection[str] | None = (),
) -> Rendered:
    """Render by a function that calls a template; see `render_messages`, which raises the same.

    name  of the tokenizer, for errors
    """
    normal, tools = normal_form(messages), normal_tools(tools)
    refusals: list[tuple[float, Finding]] = []  # (number of losses, the first of them)
    with_loss: Rendered | None = None
    for spelling in _spellings(normal):
        try:
            text = call_template(render, spelling, tools)
        except TemplateError as error:
            refusals.append((math.inf, Finding(f"the chat template of {name} refuses it ({error.__cause__})")))
            continue
        losses = [] if may_lose is None else list(_losses(text, messages, spelling, tools, render, name))
        if not losses:
            return Rendered(text, spelling, tools)
        if severe := [finding for field, finding in losses if field not in (may_lose or ())]:
            refusals.append((len(severe), severe[0]))
        elif with_loss is None:
            with_loss = Rendered(text, spelling, tools, replace(losses[0][1], is_warning=True))
    if with_loss is None:
        raise FindingError(min(refusals, key=lambda refusal: refusal[0])[1])
    return with_loss


# ------------------------------------------------------------------------------------------------ one spelling
def normal_form(messages: Messages) -> list[Message]:
    """Return messages in the one spelling: calls as objects, and nothing that is null or empty.

    Content is text, except where another than the assistant said it in several parts: templates that know parts decide
    what stands between them.

    Raises ValueError: `tool_calls` is not a list of objects.
    """
    names: dict[str, object] = {}  # id of a call → name of its function
    return [_normal_message(message, names) for message in messages]


def _normal_message(message: Mapping[str, object], names: dict[str, object]) -> Message:
    cleaned: Message = {key: value for key, value in message.items() if value is not None and key not in LOSS_KEYS}
    cleaned["content"] = _normal_content(cleaned.get("content", ""), message.get("role"))
    cleaned.pop("tool_calls", None)
    if calls := [_normal_call(call) for call in objects(message.get("tool_calls") or [])]:
        cleaned["tool_calls"] = calls
        ids = [str(call.get("id")) for call in calls]
        for key, call in zip(ids, calls, strict=True):  # an answer to one of several calls without an id has no name
            names[key] = call["function"].get("name") if ids.count(key) == 1 else None
    thought = next((cleaned[key] for key in THOUGHTS if cleaned.get(key) and isinstance(cleaned[key], str)), None)
    for key in THOUGHTS:
        if not cleaned.setdefault(key, thought):
            del cleaned[key]
    if cleaned.get("role") == "tool" and (name := names.get(str(cleaned.get("tool_call_id")))) is not None:
        cleaned.setdefault("name", name)
    return cleaned


def _normal_content(content: object, role: object) -> object:
    """Join the assistant's parts of text, as they were sampled; a single part becomes text, other content stays."""
    if not isinstance(content, list) or not all(_is_text_part(part) for part in content):
        return content
    if role == "assistant" or len(content) < 2:
        return "".join(part["text"] for part in content)
    return [{"type": "text", "text": part["text"]} for part in content]


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _normal_call(call: Mapping[str, object]) -> Message:
    """Return a call in OpenAI's form, the arguments as an object."""
    inner = call.get("function")
    if not isinstance(inner, dict):  # without the wrapper, as some data sets have it
        inner = {key: value for key, value in call.items() if key not in ("id", "type")}
        call = {"id": call.get("id")}
    function = {**_without_nulls(inner), "arguments": decoded(inner.get("arguments"))}
    return {"type": "function", **_without_nulls(call), "function": function}


def decoded(arguments: object) -> object:
    """Return arguments of a call as an object, where they are JSON text of one; templates write the JSON themselves.

    An empty text means no arguments. Text that is not an object's JSON stays text: some model wrote it.
    """
    if not isinstance(arguments, str) or not arguments.strip():
        return arguments if isinstance(arguments, list | dict) else {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def normal_tools(tools: object) -> object:
    """Return tools for a template: None for an empty list, no null, and `parameters` as an object."""
    if not isinstance(tools, list | tuple):
        return tools or None
    return [_normal_tool(tool) if isinstance(tool, dict) else tool for tool in tools] or None


def tools_of(metadata: Mapping[str, object]) -> list[Message] | None:
    """Return the tools that a sample's prompt is rendered with: a list of objects; None for none.

    --tool-key puts them into the metadata, or a row has them there. Any other value of that name is a user's own.
    """
    tools = metadata.get("tools")
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def _normal_tool(tool: Message) -> Message:
    cleaned = _without_nulls(tool)
    if isinstance(inner := cleaned.get("function"), dict):
        cleaned["function"] = _normal_tool(inner)
    if isinstance(parameters := cleaned.get("parameters"), str):
        cleaned["parameters"] = decoded(parameters)
    return cleaned


def _without_nulls(value: Mapping[str, object]) -> Message:
    return {key: item for key, item in value.items() if item is not None}


def objects(values: object) -> list[Message]:
    """Return a list of a message, of which each value is an object. ValueError: it is another one."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"a message holds {values!r:.80} where a list of objects is wanted")
    return list(values)


# ------------------------------------------------------------------------------------------------ what templates read
def _spellings(normal: list[Message]) -> Iterator[list[Message]]:
    """Yield messages as most templates read them, then as a few do.

    Templates of models that see pictures render parts; for others, parts of text become lines. DeepSeek's templates
    want `arguments` as text, and a content of null next to calls; LLaVA's want all content as parts.
    """
    yield normal
    if any(isinstance(message["content"], list) for message in normal):
        normal = [_with_lines(message) for message in normal]
        yield normal
    if any("tool_calls" in message for message in normal):
        yield [_with_null_content(message) for message in normal]
        texts = [_with_text_arguments(message) for message in normal]
        yield texts
        yield [_with_null_content(message) for message in texts]
    yield [_with_parts(message) for message in normal]


def _with_lines(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, list) or not all(_is_text_part(part) for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _with_null_content(message: Message) -> Message:
    return message if message["content"] or "tool_calls" not in message else {**message, "content": None}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [f if isinstance(f["arguments"], str) else {**f, "arguments": _json(f["arguments"])} for f in functions]
    calls = [{**call, "function": text} for call, text in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": calls}


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------ what was rendered
def _losses(
    text: str, written: Messages, messages: list[Message], tools: object, render: Render, name: str
) -> Iterator[tuple[str, Finding]]:
    """Yield (field, finding) of each text that a rendering lacks, or writes as Python prints it.

    A text may be missing at the end if it is in the rendering that ends with its message: templates leave thoughts of
    earlier turns out, as the model sees them.

    written   messages as they came, which say by what name a thought goes
    messages  the same in the spelling that was rendered
    """
    if _prints_python(text, messages, tools):
        cause = f"the chat template of {name} writes parts of a content, or arguments of a call, as Python prints them"
        yield "", Finding(cause, hint="give them as text")
    holds = _Search(text).holds
    lost: dict[str, tuple[int, str]] = {}  # field → its last message, and the text
    for number, (original, message) in enumerate(zip(written, messages, strict=True)):
        lost |= {field: (number, part) for field, part in _fields(original, message) if not holds(part)}
    for field, (number, part) in lost.items():
        if number == len(messages) - 1 or not _Search(_up_to(number, messages, tools, render)).holds(part):
            cause = f"the chat template of {name} does not render {field!r} of a message"
            yield field, Finding(cause, f"message {number + 1}: {part[:80]!r}", _ADVICE)
    if "tool_calls" not in lost and not _renders_calls(messages, tools, render):
        yield (
            "tool_calls",
            Finding(f"the chat template of {name} does not render 'tool_calls' of a message", "", _ADVICE),
        )
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and not holds(str(function.get("name", ""))):
            hint = "leave them out, or take one that renders them"
            yield TOOLS, Finding(f"the chat template of {name} does not render tools", repr(function["name"]), hint)


def _renders_calls(messages: list[Message], tools: object, render: Render) -> bool:
    """Return whether the last call is in the rendering: the tools or a question may also have its words."""
    number = max((i for i, message in enumerate(messages) if "tool_calls" in message), default=None)
    if number is None:
        return True
    *calls, last = messages[number]["tool_calls"]
    marked = {**last, "function": {**last["function"], "name": _NO_TOOL}}
    conversation = [*messages[:number], {**messages[number], "tool_calls": [*calls, marked]}]
    try:
        return _NO_TOOL in call_template(render, conversation, tools)
    except TemplateError:  # it wants more messages behind the call
        return True


def _up_to(number: int, messages: list[Message], tools: object, render: Render) -> str:
    try:
        return call_template(render, messages[: number + 1], tools)
    except TemplateError:
        return ""


def _prints_python(text: str, messages: list[Message], tools: object) -> bool:
    """Return whether an object was written as Python prints it, or a part as JSON: no model has seen that.

    A text of the conversation, such as the answer of a tool, may quote one; the template must add no other.
    """
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    printed = [form(part) for part in parts for form in (repr, _json)]
    for message in messages:
        values = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        printed += [repr(value) for value in values if isinstance(value, dict) and _json(value) != repr(value)]
    if not any(form in text for form in printed):
        return False
    thoughts = [thought for message in messages for thought in {str(message.get(key, "")) for key in THOUGHTS}]
    written = [*thoughts, *(str(part.get("text", "")) for part in parts), _json(tools)]
    written += [content for content in contents if isinstance(content, str)]
    return any(text.count(form) > sum(text_written.count(form) for text_written in written) for form in printed)


def _fields(written: Mapping[str, object], message: Message) -> Iterator[tuple[str, str]]:
    """Yield (field, a text that must be in the rendering) of a message as it came, and as it was rendered."""
    content = message["content"]
    for part in content if isinstance(content, list) else [{"text": content}]:
        if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
            continue
        if message.get("role") == "assistant":
            # Templates take thoughts out of what the assistant said, by marks of their own.
            yield BESIDE_CALLS if "tool_calls" in message else "content", re.split(r"[>\]]", text)[-1]
        else:
            yield from (("content", piece) for piece in _SWITCHES.split(text))
    for field in (*THOUGHTS, "refusal"):
        if isinstance(text := written.get(field), str):
            yield field, text
    functions = [("tool_calls", call["function"]) for call in message.get("tool_calls", ())]
    if isinstance(message.get("function_call"), dict):
        functions.append(("function_call", message["function_call"]))
    for field, function in functions:
        yield field, str(function.get("name") or "")
        arguments = decoded(function.get("arguments"))
        if isinstance(arguments, str):
            yield field, arguments
        for key, value in arguments.items() if isinstance(arguments, dict) else ():
            yield field, str(key)
            if isinstance(value, str):
                yield field, value


class _Search:
    """Looks for parts in a text, also with other white space, or escaped as JSON and Python do."""

    def __init__(self, text: str) -> None:
        self._text = text

    def holds(self, part: str) -> bool:
        part = part.strip()
        return part in self._text or _bare(part) in self._bare or _bare(_json(part)) in self._bare

    @functools.cached_property
    def _bare(self) -> str:
        return _bare(self._text)


def _bare(text: str) -> str:
    return re.sub(r"[\s\"'\\]+", "", text)


class TemplateError(ValueError):
    """A chat template refuses a conversation."""


def call_template(render: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return the text that `render(*args, **kwargs)` makes by a chat template.

    Raises TemplateError: with the template's own words.
    """
    try:
        return str(render(*args, **kwargs))
    except Exception as error:  # a template is code of the model's folder, and may raise anything
        raise TemplateError(f"{type(error).__name__}: {error}") from error


_MARK = "assistantsays"


def tokens_after_assistant(
    messages: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_token: int | None,
    template_kwargs: Mapping[str, object] | None = None,
    tools: object = None,
) -> list[int]:
    """Tokens from the end of an assistant's turn, through `messages` (of tools, or of a user), to its next turn.

    They are read off renderings with a dummy instead of the turn, so that the turn's own tokens, which were
    sampled, are never tokenized anew.

    end_token  the token by which the model ended its turn; None where it did not (a stop string did): then the
               template's own end marker comes first

    Raises ValueError: the template cannot render such messages, or not as a continuation of the turn; names it.
    """

    def render(conversation: Sequence[Mapping[str, object]], for_answer: bool) -> str:
        flags: dict[str, Any] = {"for_answer": for_answer, "template_kwargs": template_kwargs}
        return render_messages(tokenizer, conversation, tools, **flags).text

    reasons = []
    for assistant in _dummies(messages):
        try:
            return _continuation(assistant, messages, tokenizer, end_token, render)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} does not render"
        f" {[message['role'] for message in messages]} after an assistant's turn ({'; '.join(reasons)}); an agent needs"
        " a template that does"
    )


def _dummies(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Assistant messages with the mark near their end: one that calls tools, as templates may demand; a plain one."""
    calls = [
        {
            "id": message.get("tool_call_id", "0"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {"x": _MARK}},
        }
        for message in messages
        if message["role"] == "tool"
    ]
    plain: Mapping[str, object] = {"role": "assistant", "content": _MARK}
    return [{"role": "assistant", "content": "", "tool_calls": calls}, plain] if calls else [plain]


def _continuation(
    assistant: Mapping[str, object],
    messages: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    end_token: int | None,
    render: Callable[[Sequence[Mapping[str, object]], bool], str],
) -> list[int]:
    before: list[Mapping[str, object]] = [{"role": "user", "content": "x"}, assistant]
    alone, full_text = render(before, False), render([*before, *messages], True)
    calls = assistant.get("tool_calls")
    num_marks = len(calls) if isinstance(calls, list) else 1
    if alone.count(_MARK) != num_marks or full_text.count(_MARK) != num_marks:
        raise ValueError("the turn is not rendered once")
    turn = alone[alone.rindex(_MARK) :]
    # What stands behind the end marker (ChatML: a line break) belongs to the continuation.
    end = next((token for token in tokenizer.all_special_tokens if turn.rstrip().endswith(token)), "")
    turn = turn.rstrip() if end else turn
    start = full_text.rindex(_MARK)
    if not full_text.startswith(turn, start):
        raise ValueError("the turn is rendered otherwise when messages follow")
    seam = start + len(turn) - (len(end) if end_token is None else 0)
    head = tokenizer.encode(full_text[:seam], add_special_tokens=False)
    tokens = tokenizer.encode(full_text, add_special_tokens=False)
    if tokens[: len(head)] != head:
        raise ValueError("the turn's tokens are others when messages follow")
    added = tokens[len(head) :]
    # Some templates have no end marker: the token by which the model ends its turn begins the next message.
    return added[1:] if added and added[0] == end_token else added
