"""Anthropic's messages: requests read, answers, events and errors written."""

import json
import uuid
from collections.abc import Iterator, Mapping

from fusionrl.rollout.sessions.messages import (
    GRAMMARS,
    MORE_SAMPLING,
    Body,
    Fields,
    Message,
    Refused,
    TurnReply,
    TurnRequest,
    call_message,
    content_of,
    function_of,
    named_event,
    objects,
    text_of,
)

FIELDS = Fields(
    taken="messages system max_tokens stop_sequences stream tools tool_choice thinking output_config output_format",
    sampling=f"temperature {MORE_SAMPLING} top_p",
    bookkeeping="model metadata cache_control service_tier inference_geo speed diagnostics user_profile_id workspace_id"
    " betas anthropic_beta anthropic_version billing_policy fallback_credit_token",
    refused={
        "prefill": "a turn must be the model's own from its first token",
        "message": "send messages",
        "container": "no code runs here; give the agent a tool that runs it",
        "mcp_servers": "no server of tools is asked here; give the agent their tools",
        "context_management": "the agent manages its context; a full one is an error",
        "compaction": "the agent manages its context; a full one is an error",
        "fallbacks": "the model of the run answers, and no other",
        "thread": "no conversation is kept between requests; send all messages",
    },
    grammars=GRAMMARS,
    codes={"thread": "thread_unsupported_request"},
)
# These tell `tool_runner` of the package `anthropic` to continue without a thread: it then sends all messages.
_DETAILS = {code: {"error_code": code, "unsupported": [name]} for name, code in FIELDS.codes.items()}
KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(values: Mapping[str, object]) -> TurnRequest:
    """Read a request of `/v1/messages`. Raises Refused if it is malformed, or asks for what cannot be done."""
    body = Body(FIELDS, values)
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    reads_calls = body.reads_calls(kind)
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        body.check_several_calls("tool_choice.disable_parallel_tool_use", False)
    output = body.mapping("output_config", "effort format")
    body.check_form("output_config.format", output.get("format"))
    body.check_form("output_format", body.get("output_format"))
    body.check_strict(body.objects("tools"))
    thinking = body.mapping("thinking", "type budget_tokens display")
    if thinking.get("budget_tokens"):
        body.ignored.append("thinking.budget_tokens")
    messages: list[Message] = []
    if system := content_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for message in objects(body.get("messages"), "messages"):
        messages += _messages(message)
    return body.turn_request(
        messages,
        [_tool(tool) for tool in body.objects("tools")],
        longest=body.limit("max_tokens"),
        stop=body.texts("stop_sequences"),
        reads_calls=reads_calls,
        thinks=_thinks(thinking),
        effort=text_of(output, "effort"),
    )


def _thinks(thinking: Mapping[str, object]) -> bool | None:
    """Return whether the model shall think; None: as it likes."""
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise Refused(f"thinking.type is {kind!r}; known are enabled, disabled and adaptive")
    return None if kind in (None, "adaptive") else kind == "enabled"


def _messages(source: Mapping[str, object]) -> list[Message]:
    """The messages of one of Anthropic's: its results of tools are messages of their own, before its text."""
    role, content = source.get("role"), source.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(f"a message has the role {role!r}; known are user and assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": content_of(content, role)}]
    results: list[Message] = []
    plain: list[object] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in objects(content, f"the content of a message of {role}"):
        if block.get("type") == "tool_result" and role == "user":
            text = content_of(block.get("content"), "tool")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif block.get("type") == "tool_use" and role == "assistant":
            calls.append(call_message(str(block.get("id")), str(block.get("name")), block.get("input")))
        elif block.get("type") == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            plain.append(block)
    message: Message = {"role": role, "content": content_of(plain, role)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return results if results and not plain else [*results, message]


def _tool(definition: Mapping[str, object]) -> Message:
    name, parameters = definition.get("name"), definition.get("input_schema")
    if definition.get("type") not in (None, "custom") or not isinstance(name, str) or not isinstance(parameters, dict):
        raise Refused(
            f"a tool of type {definition.get('type')!r}; only tools with a name and an input_schema can be called"
        )
    return function_of(name, definition.get("description"), parameters)


# ------------------------------------------------------------------------------------------------ answers
def answer(turn_request: TurnRequest, reply: TurnReply) -> Message:
    """The body of an answer."""
    return {
        **_head(turn_request, _usage(reply)),
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
    }


def events(turn_request: TurnRequest, reply: TurnReply) -> Iterator[bytes]:
    """The events of a streamed answer."""
    usage = _usage(reply)
    head = _head(turn_request, {**usage, "output_tokens": 0})
    yield named_event("message_start", {"message": {**head, "content": [], "stop_reason": None, "stop_sequence": None}})
    for index, block in enumerate(_blocks(reply)):
        start: Message
        delta: Message
        if block["type"] == "text":
            start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield named_event("content_block_start", {"index": index, "content_block": start})
        yield named_event("content_block_delta", {"index": index, "delta": delta})
        yield named_event("content_block_stop", {"index": index})
    reason = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_string}
    yield named_event("message_delta", {"delta": reason, "usage": {"output_tokens": reply.num_sampled}})
    yield named_event("message_stop", {})


def error(refused: Refused) -> Message:
    kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    details = {"details": _DETAILS[refused.code]} if refused.code in _DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": str(refused), **details}}


def error_event(refused: Refused) -> bytes:
    """Return the event that ends a started stream with an error."""
    return named_event("error", error(refused))


def _head(turn_request: TurnRequest, usage: Message) -> Message:
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "type": "message", "role": "assistant", "model": turn_request.model, "usage": usage}


def _blocks(reply: TurnReply) -> list[Message]:
    """The content; never empty, as agents read `content[0].text`."""
    text: list[Message] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in reply.calls]
    return [*text, *calls]


def _stop_reason(reply: TurnReply) -> str:
    return "stop_sequence" if reply.stop_string is not None else _FINISH[reply.finish]


def _usage(reply: TurnReply) -> Message:
    """Tokens; `input_tokens` are those that no cache had, as Anthropic counts."""
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached,
        "cache_read_input_tokens": reply.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.num_sampled,
    }
