"""What the client packages demand: payloads of their types, cut and empty turns, and calls that can be sent back."""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from fusionrl.data.sample import Sample
from fusionrl.rollout.sessions import anthropic_api, openai_api, responses_api
from fusionrl.rollout.sessions.messages import Call, Refused, TurnReply, TurnRequest
from fusionrl.rollout.types import SESSION
from tests.rollout.engine import Engine, needs
from tests.rollout.test_session_fields import ask as read
from tests.rollout.test_sessions import meet, play, say  # noqa: F401

TOOLS: Any = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
# (writer, module of the types, type of an answer, type of an event of a stream)
TYPES: list[tuple[Any, str, str, str]] = [
    (openai_api, "openai.types.chat", "ChatCompletion", "ChatCompletionChunk"),
    (responses_api, "openai.types.responses", "Response", "ResponseStreamEvent"),
    (anthropic_api, "anthropic.types", "Message", "RawMessageStreamEvent"),
    (anthropic_api, "anthropic.types.beta", "BetaMessage", "BetaRawMessageStreamEvent"),
]


@pytest.mark.parametrize(("api", "module", "answer", "event"), TYPES, ids=[one[2] for one in TYPES])
def test_payloads_have_every_field_of_the_packages_types(api: Any, module: str, answer: str, event: str) -> None:
    """The packages do not check it: a field that is missing is an AttributeError of the agent that reads it."""
    types = pytest.importorskip(module)
    whole, part = TypeAdapter(getattr(types, answer)), TypeAdapter(getattr(types, event))
    calls = ((), (Call("call00000", "f", '{"x": 1}'),))
    asked = TurnRequest([{"role": "user", "content": "x"}], tools=TOOLS, model="m", wants_usage=True, longest=9)
    for text, made, finish in itertools.product(("", "Hm."), calls, ("stop", "length", "tool_calls")):
        stop = "S" if finish == "stop" else None
        said = TurnReply(text, made, finish, stop, 10, 4, 5)
        whole.validate_python(api.answer(asked, said))
        for value in _data(api.events(asked, said)):
            part.validate_python(value)
    if api is responses_api:
        for value in _data([api.error_event(Refused("x", 500))]):
            part.validate_python(value)


def _data(events: Iterable[bytes]) -> Iterator[Any]:
    for line in b"".join(events).decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@needs("sglang")
@pytest.mark.parametrize(
    "agent",
    ["with_openai_stream", "with_responses_stream", pytest.param("with_openai_agents", marks=needs("agents"))],
)
def test_a_turn_that_a_limit_cut_may_end_the_agent(play: Any, agent: str) -> None:  # noqa: F811
    """These clients raise instead of giving the agent such a turn: it counts, and is TRUNCATED."""
    pytest.importorskip("openai")
    (sample,), _ = play(agent, ["It is wet. " * 9], rollout_max_response_len=20)
    assert (sample.status, sample.metadata[SESSION]["num_turns"]) == (Sample.Status.TRUNCATED, 1)
    assert (sample.response, sample.reward) == ("It is wet. It is wet", None), "the run's reward function scores it"


@needs("anthropic")
def test_an_empty_turn_has_a_text(play: Any) -> None:  # noqa: F811
    samples, _ = play("with_anthropic_text", ["", ""])
    assert samples[0].reward == 0.0


@needs("sglang")
@pytest.mark.parametrize("arguments", ['{"town": NaN}', '{"town": "\\ud800"}', '{"town": ' + "1" * 5000 + "}", "[]"])
def test_a_call_that_no_client_can_send_back_is_text(meet: Any, arguments: str) -> None:  # noqa: F811
    """An echo without an exact JSON form would end the agent, or begin a segment in each turn."""
    said = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'

    async def use(session: Any, http: Any, engine: Engine) -> Any:
        return await say(http, session, "Wet?", tools=TOOLS)

    limits = {"rollout_max_response_len": 9000, "rollout_max_context_len": 12000}
    (choice,) = meet(use, [said], tool_call_parser="qwen25", **limits)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": said, "refusal": None}


def test_half_of_a_surrogate_pair_is_refused(meet: Any) -> None:  # noqa: F811
    async def use(session: Any, http: Any, engine: Engine) -> None:
        body = '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 9}'
        for path in ("/messages/count_tokens", "/messages", "/chat/completions"):
            async with http.post(session.base_url + path, data=body) as answer:
                assert answer.status == 400, path

    meet(use, [])


# ------------------------------------------------------------------------------------------------ what is read
def test_a_thread_is_refused_as_the_loop_of_tools_reads_it() -> None:
    with pytest.raises(Refused) as caught:
        read("messages", thread={"type": "create"})
    error: Any = anthropic_api.error(caught.value)
    assert error["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other: Any = anthropic_api.error(Refused("x", code="context_length_exceeded"))
    assert set(other["error"]) == {"type", "message"}


def test_calls_of_other_turns_stay_apart() -> None:
    """A call goes to the turn before its neighbours' outputs only if its id names that turn."""
    said = TurnReply("", (Call("1", "f", "{}"), Call("2", "g", "{}")), "tool_calls", None, 1, 0, 1)
    answer: Any = responses_api.answer(TurnRequest([]), said)
    first, second = answer["output"]
    outputs = [{"type": "function_call_output", "call_id": number, "output": "x"} for number in "12"]
    user = {"role": "user", "content": "x"}

    def roles(*items: Any) -> list[Any]:
        return [message["role"] for message in read("responses", input=list(items)).messages]

    assert roles(user, first, outputs[0], second, outputs[1]) == ["user", "assistant", "tool", "tool"]
    apart = ["user", "assistant", "tool", "assistant", "tool"]
    for other in (f"fc_{'0' * 32}_0", "fc_1", None):
        assert roles(user, first, outputs[0], {**second, "id": other}, outputs[1]) == apart
    assert roles(user, {**first, "id": None}, outputs[0], {**second, "id": None}, outputs[1]) == apart
    assert roles(user, first, outputs[0], user, second, outputs[1])[3:] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("name", "more", "named"),
    [
        ("messages", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ("messages", {"thinking": {"type": "adaptive", "depth": 3}}, "thinking.depth"),
        ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("responses", {"text": {"length": 3}}, "text.length"),
    ],
)
def test_fields_of_fields_are_not_ignored(name: str, more: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=f"^{named}: no such field"):
        read(name, **more)
    ((field, value),) = more.items()
    assert read(name, **{field: {**value, named.partition(".")[2]: None}}) is not None


def test_strict_tools_are_spoken_of() -> None:
    function: Any = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    for name, tool in (
        ("chat", {"type": "function", "function": function}),
        ("responses", {"type": "function", **function}),
        ("messages", {"name": "f", "input_schema": function["parameters"], "strict": True}),
    ):
        assert read(name, tools=[tool]).ignored == ("tools.strict",)
