"""OpenAI's responses: requests read, answers, events and errors written. None is kept: an agent sends all items."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping

from fusionrl.rollout.sessions import openai_api
from fusionrl.rollout.sessions.messages import (
    GRAMMARS,
    ROLES,
    Body,
    Call,
    Fields,
    Message,
    Refused,
    TurnReply,
    TurnRequest,
    call_message,
    content_of,
    named_event,
    objects,
    openai_tool,
    text_of,
)

KEEP_ALIVE = openai_api.KEEP_ALIVE
_NOT_KEPT = "no response is kept between requests; send all items as input"
FIELDS = Fields(
    taken="input instructions max_output_tokens stream tools tool_choice parallel_tool_calls reasoning text include"
    " truncation chat_template_kwargs",
    sampling=openai_api.SAMPLING,
    bookkeeping=f"{openai_api.BOOKKEEPING} stream_options max_tool_calls",  # of the server's own tools
    refused={
        "top_logprobs": openai_api.NOT_SENT,
        "previous_response_id": _NOT_KEPT,
        "conversation": _NOT_KEPT,
        "background": _NOT_KEPT,
        "prompt": "no prompt is kept here; send it as input",
        "context_management": "the agent manages its context; a full one is an error",
        "moderation": openai_api.FIELDS.refused["moderation"],
        "image": openai_api.TEXT_ALONE,
        "access_programs": "the server has no programs",
    },
    grammars=GRAMMARS,
)


def read(values: Mapping[str, object]) -> TurnRequest:
    """Read a request of `/v1/responses`. Raises Refused if it is malformed, or asks for what cannot be done."""
    body = Body(FIELDS, values)
    if body.get("truncation") not in (None, "disabled"):
        raise Refused("truncation: no item is dropped here; a full context is an error")
    if body.get("include") not in (None, [], ["reasoning.encrypted_content"]):  # thoughts are part of the text
        raise Refused(f"include {body.get('include')!r:.80}: the model's answer has nothing of it")
    reads_calls = body.reads_calls(body.get("tool_choice"))
    body.check_several_calls("parallel_tool_calls", body.get("parallel_tool_calls"))
    form = body.mapping("text", "format verbosity")
    body.check_form("text.format", form.get("format"))
    body.check_strict(body.objects("tools"))
    effort = text_of(body.mapping("reasoning", "effort summary generate_summary"), "effort")
    messages = _messages(body.get("input"))
    if instructions := content_of(body.get("instructions"), "system"):
        messages.insert(0, {"role": "system", "content": instructions})
    return body.turn_request(
        messages,
        [openai_tool(tool, tool) for tool in body.objects("tools")],
        longest=body.limit("max_output_tokens"),
        reads_calls=reads_calls,
        effort=effort,
        verbosity=text_of(form, "verbosity"),
    )


def _messages(source: object) -> list[Message]:
    """Return the messages of items: a turn of the model is a message, the calls behind it, and a thought before it.

    Many agents send each call of a turn right before its output: the id of the item says to which turn a call belongs.
    """
    if isinstance(source, str):
        return [{"role": "user", "content": source}]
    messages: list[Message] = []
    thoughts: list[str] = []
    calling = ""  # the turn of the last call
    for item in objects(source, "input"):
        kind = item.get("type") or "message"
        if kind == "reasoning":
            if item.get("encrypted_content"):
                raise Refused("a thought that is encrypted cannot be read here; send its text, or leave it out")
            thoughts += [str(part.get("text") or "") for part in objects(item.get("content") or [], "content")]
        elif kind == "function_call":
            turn, caller = _turn_of(item), next((m for m in reversed(messages) if m["role"] != "tool"), None)
            goes_on = caller is not None and (caller is messages[-1] or (turn and turn == calling))
            if caller is None or caller["role"] != "assistant" or thoughts or not goes_on:
                caller = {"role": "assistant", "content": ""}
                messages.append(caller)
            call = call_message(str(item.get("call_id")), str(item.get("name")), item.get("arguments"))
            caller["tool_calls"] = [*objects(caller.get("tool_calls") or [], "tool_calls"), call]
            calling = turn
        elif kind == "function_call_output":
            output = content_of(item.get("output"), "tool")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ROLES or role == "tool":
                raise Refused(f"a message has the role {role!r}; known are system, developer, user and assistant")
            messages.append({"role": role, "content": content_of(item.get("content"), role)})
        else:
            raise Refused(
                f"an item of type {kind!r}; known are message, function_call, function_call_output, reasoning"
            )
        if thoughts and kind != "reasoning" and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "\n".join(thoughts)
            thoughts = []
    return messages


def _turn_of(item: Mapping[str, object]) -> str:
    """Return the turn in which a call was answered, from the id that `_items` gave it; empty for another server's."""
    return "".join(re.findall(r"^fc_([0-9a-f]{32})_\d+$", str(item.get("id"))))


# ------------------------------------------------------------------------------------------------ answers
def answer(request: TurnRequest, turn: TurnReply) -> Message:
    """The body of an answer."""
    return _response(request, turn, _items(turn))


def events(request: TurnRequest, turn: TurnReply) -> Iterator[bytes]:
    """The events of a streamed answer."""
    response = _response(request, turn, _items(turn))
    opened_response = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    named: list[tuple[str, Message]] = [
        ("response.created", {"response": opened_response}),
        ("response.in_progress", {"response": opened_response}),
    ]
    for index, item in enumerate(objects(response["output"], "output")):
        named += _item_events(index, dict(item))
    named.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, value) in enumerate(named):
        yield named_event(kind, {"sequence_number": number, **value})


def _item_events(index: int, item: Message) -> Iterator[tuple[str, Message]]:
    place: Message = {"output_index": index, "item_id": item["id"]}
    opened = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        yield "response.output_item.added", {"output_index": index, "item": {**opened, "arguments": ""}}
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**place, **done}
    else:
        (part,) = objects(item["content"], "content")
        place["content_index"] = 0
        yield "response.output_item.added", {"output_index": index, "item": {**opened, "content": []}}
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


error = openai_api.error


def error_event(refused: Refused) -> bytes:
    """The event that ends a stream with an error."""
    return named_event("error", {"code": refused.code, "message": str(refused), "param": None, "sequence_number": 0})


def _response(request: TurnRequest, turn: TurnReply, items: list[Message]) -> Message:
    is_cut = turn.finish == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "max_output_tokens": request.longest,
        "metadata": {},
        "model": request.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if request.reads_calls else "none",
        "tools": [{"type": "function", "strict": False, **function} for function in _functions(request)],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.num_cached, "cache_write_tokens": 0},
            "output_tokens": turn.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt_tokens + turn.num_sampled,
        },
    }


def _functions(request: TurnRequest) -> list[Message]:
    return [tool["function"] for tool in request.tools if isinstance(tool["function"], dict)]


def _items(turn: TurnReply) -> list[Message]:
    status = "incomplete" if turn.finish == "length" else "completed"
    turn_id = uuid.uuid4().hex
    items = [_call(call, f"fc_{turn_id}_{number}") for number, call in enumerate(turn.calls)]
    if not turn.text and items:
        return items
    part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
    text: Message = {"type": "message", "id": f"msg_{turn_id}", "role": "assistant"}
    return [text | {"status": status, "content": [part]}, *items]


def _call(call: Call, item_id: str) -> Message:
    named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
    return {"type": "function_call", "id": item_id, **named}
