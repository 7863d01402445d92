"""Anthropic's messages: requests read, answers, events and errors written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping

from fusionrl.rollout.sessions.messages import (
    Asked,
    Message,
    Refused,
    Said,
    call_message,
    checked,
    content_of,
    function_of,
    objects,
    texts,
    whole_number,
)

# Sampling of tokens that are trained on is the run's (--rollout-temperature and its like).
IGNORED = ("temperature", "top_p", "top_k")
KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Mapping[str, object]) -> Asked:
    """Read a request of `/v1/messages`.

    Raises:
        Refused: it is malformed, or asks for what would not be the model's own sampling.
    """
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise Refused(f"tool_choice {kind!r}: the model is free to call tools or not; use auto or none")
    messages: list[Message] = []
    if system := content_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for given in objects(body.get("messages"), "messages"):
        messages += _messages(given)
    return Asked(
        messages=checked(messages),
        tools=[_tool(one) for one in objects(body.get("tools") or [], "tools")],
        longest=whole_number(body.get("max_tokens"), "max_tokens"),
        stop=texts(body.get("stop_sequences"), "stop_sequences"),
        reads_calls=kind == "auto",
        model=str(body.get("model") or ""),
        is_stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
    )


def _messages(given: Mapping[str, object]) -> list[Message]:
    """The messages of one of Anthropic's: its results of tools are messages of their own, before its text."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(f"a message has the role {role!r}; known are user and assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": content_of(content, role)}]
    results: list[Message] = []
    plain: list[object] = []
    calls: list[Message] = []
    for block in objects(content, f"the content of a message of {role}"):
        if block.get("type") == "tool_result" and role == "user":
            text = content_of(block.get("content"), "tool")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif block.get("type") == "tool_use" and role == "assistant":
            calls.append(call_message(str(block.get("id")), str(block.get("name")), block.get("input")))
        elif block.get("type") not in ("thinking", "redacted_thinking"):  # never sent from here
            plain.append(block)
    message: Message = {"role": role, "content": content_of(plain, role)}
    if calls:
        message["tool_calls"] = calls
    return results if results and not plain else [*results, message]


def _tool(given: Mapping[str, object]) -> Message:
    name, parameters = given.get("name"), given.get("input_schema")
    if given.get("type") not in (None, "custom") or not isinstance(name, str) or not isinstance(parameters, dict):
        raise Refused(f"a tool of type {given.get('type')!r}; only tools with a name and an input_schema can be called")
    return function_of(name, given.get("description"), parameters)


# ------------------------------------------------------------------------------------------------ answers
def answer(asked: Asked, said: Said) -> Message:
    """The body of an answer."""
    return {
        **_head(asked, _usage(said)),
        "content": _blocks(said),
        "stop_reason": _stop_reason(said),
        "stop_sequence": said.stop_string,
    }


def events(asked: Asked, said: Said) -> Iterator[bytes]:
    """The events of a streamed answer."""
    usage = _usage(said)
    head = _head(asked, {**usage, "output_tokens": 0})
    yield _event("message_start", {"message": {**head, "content": [], "stop_reason": None, "stop_sequence": None}})
    for index, block in enumerate(_blocks(said)):
        start: Message
        delta: Message
        if block["type"] == "text":
            start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", {"index": index, "content_block": start})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    reason = {"stop_reason": _stop_reason(said), "stop_sequence": said.stop_string}
    yield _event("message_delta", {"delta": reason, "usage": {"output_tokens": said.num_sampled}})
    yield _event("message_stop", {})


def error(refused: Refused) -> Message:
    """The body of an error."""
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def error_event(refused: Refused) -> bytes:
    """The event that ends a stream which has begun."""
    return _event("error", error(refused))


def _head(asked: Asked, usage: Message) -> Message:
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "type": "message", "role": "assistant", "model": asked.model, "usage": usage}


def _blocks(said: Said) -> list[Message]:
    text: list[Message] = [{"type": "text", "text": said.text}] if said.text else []
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in said.calls]
    return [*text, *calls]


def _stop_reason(said: Said) -> str:
    return "stop_sequence" if said.stop_string is not None else _FINISH[said.finish]


def _usage(said: Said) -> Message:
    """Tokens; `input_tokens` are those that no cache had, as Anthropic counts."""
    return {
        "input_tokens": said.num_asked - said.num_cached,
        "cache_read_input_tokens": said.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": said.num_sampled,
    }


def _event(kind: str, value: Message) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n".encode()
