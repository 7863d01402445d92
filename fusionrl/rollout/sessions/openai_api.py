"""OpenAI's chat completions: requests read, answers, events and errors written."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping

from fusionrl.rollout.sessions.messages import (
    ROLES,
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
IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
KEEP_ALIVE = b": the model is answering\n\n"


def read(body: Mapping[str, object]) -> Asked:
    """Read a request of `/v1/chat/completions`.

    Raises:
        Refused: it is malformed, or asks for what would not be the model's own sampling.
    """
    if body.get("n") not in (None, 1):
        raise Refused(f"n is {body['n']!r}: one answer is sampled for each request")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise Refused("logprobs: they are recorded in the sample, and not sent")
    form = body.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise Refused(f"response_format {form!r:.80}: a grammar would change what the model samples")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice {choice!r:.80}: the model is free to call tools or not; use auto or none")
    limits = [whole_number(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
    options = body.get("stream_options")
    return Asked(
        messages=checked([_message(one) for one in objects(body.get("messages"), "messages")]),
        tools=[_tool(one) for one in objects(body.get("tools") or [], "tools")],
        longest=min((limit for limit in limits if limit is not None), default=None),
        stop=texts(body.get("stop"), "stop"),
        reads_calls=choice == "auto",
        model=str(body.get("model") or ""),
        is_stream=bool(body.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
    )


def _message(given: Mapping[str, object]) -> Message:
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in ROLES:
        raise Refused(f"a message has the role {role!r}; known are {', '.join(ROLES)}")
    made: Message = {"role": role, "content": content_of(given.get("content"), role)}
    if role == "tool":
        if not isinstance(given.get("tool_call_id"), str):
            raise Refused("a message of a tool has no tool_call_id")
        made["tool_call_id"] = given["tool_call_id"]
    if given.get("reasoning_content"):
        made["reasoning_content"] = str(given["reasoning_content"])
    if calls := objects(given.get("tool_calls") or [], "tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _call(given: Mapping[str, object]) -> Message:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a call of a tool has no function with a name")
    return call_message(str(given.get("id")), function["name"], function.get("arguments"))


def _tool(given: Mapping[str, object]) -> Message:
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"a tool of type {given.get('type')!r}; only functions with a name and parameters can be called")
    return function_of(function["name"], function.get("description"), function.get("parameters"))


# ------------------------------------------------------------------------------------------------ answers
def answer(asked: Asked, said: Said) -> Message:
    """The body of an answer."""
    message: Message = {"role": "assistant", "content": said.text or (None if said.calls else ""), "refusal": None}
    if said.calls:
        message["tool_calls"] = _calls(said)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": said.finish}
    return {**_head(asked, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def events(asked: Asked, said: Said) -> Iterator[bytes]:
    """The events of a streamed answer."""
    head = _head(asked, "chat.completion.chunk")

    def event(delta: Message, finish: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    yield event({"role": "assistant", "content": ""})
    if said.text:
        yield event({"content": said.text})
    for index, call in enumerate(_calls(said)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, said.finish)
    if asked.wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(said)})
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> Message:
    """The body of an error."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def error_event(refused: Refused) -> bytes:
    """The event that ends a stream which has begun."""
    return _event(error(refused))


def _head(asked: Asked, kind: str) -> Message:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": asked.model}


def _calls(said: Said) -> list[Message]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.calls
    ]


def _usage(said: Said) -> Message:
    return {
        "prompt_tokens": said.num_asked,
        "completion_tokens": said.num_sampled,
        "total_tokens": said.num_asked + said.num_sampled,
        "prompt_tokens_details": {"cached_tokens": said.num_cached},
    }


def _event(value: Message) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
