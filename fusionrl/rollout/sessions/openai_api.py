"""OpenAI's chat completions: requests read, answers, events and errors written."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping

from fusionrl.data.render import THOUGHTS
from fusionrl.rollout.sessions.messages import (
    GRAMMARS,
    MORE_SAMPLING,
    ROLES,
    Body,
    Fields,
    Message,
    Refused,
    TurnReply,
    TurnRequest,
    call_message,
    content_of,
    objects,
    openai_tool,
    text_of,
)

NOT_SENT = "log-probs are recorded in the sample, and not sent"
TEXT_ALONE = "the models here read and write text alone"
BOOKKEEPING = (
    "model metadata user safety_identifier service_tier store prompt_cache_key prompt_cache_options"
    " prompt_cache_retention"
)
SAMPLING = f"temperature top_p seed presence_penalty frequency_penalty logit_bias {MORE_SAMPLING}"
FIELDS = Fields(
    taken="messages max_tokens max_completion_tokens n stop stream stream_options tools tool_choice parallel_tool_calls"
    " response_format modalities reasoning_effort verbosity chat_template_kwargs",
    sampling=SAMPLING,
    bookkeeping=f"{BOOKKEEPING} prediction",  # a prediction makes the same answer faster
    refused={
        "logprobs": NOT_SENT,
        "top_logprobs": NOT_SENT,
        "functions": "the older form of tools; send tools",
        "function_call": "the older form of tool_choice and tool_calls; send these",
        "audio": TEXT_ALONE,
        "web_search_options": "the server has no search; give the agent a tool that searches",
        "moderation": "the server moderates no answers",
    },
    grammars=GRAMMARS,
)
KEEP_ALIVE = b": the model is answering\n\n"
_TEXTS = (*THOUGHTS, "refusal", "name")  # of a message, for the chat template


def read(values: Mapping[str, object]) -> TurnRequest:
    """Read a request of `/v1/chat/completions`. Raises Refused if it is malformed, or asks for what cannot be done."""
    body = Body(FIELDS, values)
    if body.get("n") not in (None, 1):
        raise Refused(f"n is {body.get('n')!r}: one answer is sampled for each request")
    if body.get("modalities") not in (None, ["text"]):
        raise Refused(f"modalities {body.get('modalities')!r:.80}: {TEXT_ALONE}")
    reads_calls = body.reads_calls(body.get("tool_choice"))
    body.check_several_calls("parallel_tool_calls", body.get("parallel_tool_calls"))
    body.check_form("response_format", body.get("response_format"))
    limits = [body.limit(name) for name in ("max_completion_tokens", "max_tokens")]
    options = body.get("stream_options")
    tools = [openai_tool(tool, tool.get("function")) for tool in body.objects("tools")]
    body.check_strict([f for tool in body.objects("tools") if isinstance(f := tool["function"], dict)])
    return body.turn_request(
        [_message(message) for message in objects(body.get("messages"), "messages")],
        tools,
        longest=min((limit for limit in limits if limit is not None), default=None),
        stop=body.texts("stop"),
        reads_calls=reads_calls,
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        effort=text_of(body.values, "reasoning_effort"),
        verbosity=text_of(body.values, "verbosity"),
    )


def _message(message: Mapping[str, object]) -> Message:
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise Refused(f"a message has the role {role!r}; known are {', '.join(ROLES)}")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise Refused(f"{name} of a message: {FIELDS.refused[name]}")
    cleaned: Message = {"role": role, "content": content_of(message.get("content"), role)}
    cleaned |= {name: text for name in _TEXTS if (text := text_of(message, name))}
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise Refused("a message of a tool has no tool_call_id")
        cleaned["tool_call_id"] = message["tool_call_id"]
    if calls := objects(message.get("tool_calls") or [], "tool_calls"):
        cleaned["tool_calls"] = [_call(call) for call in calls]
    return cleaned


def _call(call: Mapping[str, object]) -> Message:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a call of a tool has no function with a name")
    return call_message(str(call.get("id")), function["name"], function.get("arguments"))


# ------------------------------------------------------------------------------------------------ answers
def answer(turn_request: TurnRequest, reply: TurnReply) -> Message:
    """The body of an answer."""
    message: Message = {"role": "assistant", "content": reply.text or (None if reply.calls else ""), "refusal": None}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    return {**_head(turn_request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def events(turn_request: TurnRequest, reply: TurnReply) -> Iterator[bytes]:
    """The events of a streamed answer."""
    head = _head(turn_request, "chat.completion.chunk")

    def event(delta: Message, finish: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    yield event({"role": "assistant", "content": ""})
    if reply.text:
        yield event({"content": reply.text})
    for index, call in enumerate(_calls(reply)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, reply.finish)
    if turn_request.wants_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> Message:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def error_event(refused: Refused) -> bytes:
    """Return the event that ends a started stream with an error."""
    return _event(error(refused))


def _head(turn_request: TurnRequest, kind: str) -> Message:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": turn_request.model,
    }


def _calls(reply: TurnReply) -> list[Message]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def _usage(reply: TurnReply) -> Message:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached},
    }


def _event(value: Message) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
