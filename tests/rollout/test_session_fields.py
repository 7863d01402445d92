"""Every field of the protocols' requests: taken, decided by the run, bookkeeping, or refused by its name."""

import importlib
import operator
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import render_prompt
from fusionrl.data.sample import Sample
from fusionrl.rollout.sessions import anthropic_api, openai_api, responses_api
from fusionrl.rollout.sessions.messages import Refused, TurnRequest
from fusionrl.rollout.sessions.session import Segments
from tests.tiny_model import make_byte_tokenizer

ASK = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
FUNCTION_TOOL = {"type": "function", "function": FUNCTION}
# protocol → (its module, a request)
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (openai_api, {"messages": ASK}),
    "responses": (responses_api, {"input": ASK}),
    "messages": (anthropic_api, {"messages": ASK, "max_tokens": 9}),
}
CLIENTS = [  # (protocol, the parameters of its client)
    ("chat", "openai.types.chat.completion_create_params.CompletionCreateParamsBase"),
    ("responses", "openai.types.responses.response_create_params.ResponseCreateParamsBase"),
    ("messages", "anthropic.types.message_create_params.MessageCreateParamsBase"),
    ("messages", "anthropic.types.beta.message_create_params.MessageCreateParamsBase"),
    ("messages", "anthropic.types.message_count_tokens_params.MessageCountTokensParams"),
]
# What each taken field may hold, and what becomes of it: an attribute of `TurnRequest` and its value.
TAKEN: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "chat": {
        "messages": ([{"role": "developer", "content": "x"}], "messages", [{"role": "system", "content": "x"}]),
        "max_tokens": (3, "longest", 3),
        "max_completion_tokens": (4, "longest", 4),
        "stop": (["a"], "stop", ("a",)),
        "stream": (True, "is_stream", True),
        "stream_options": ({"include_usage": True}, "wants_usage", True),
        "tools": ([FUNCTION_TOOL], "tools", [FUNCTION_TOOL]),
        "tool_choice": ("none", "reads_calls", False),
        "parallel_tool_calls": (False, "constraints", "parallel_tool_calls"),
        "response_format": ({"type": "json_object"}, "constraints", "response_format"),
        "reasoning_effort": ("low", "effort", "low"),
        "verbosity": ("low", "verbosity", "low"),
        "chat_template_kwargs": ({"enable_thinking": False}, "template", {"enable_thinking": False}),
        "n": (2, "refused", "n is 2"),
        "modalities": (["audio"], "refused", "modalities"),
    },
    "responses": {
        "input": ("x", "messages", [{"role": "user", "content": "x"}]),
        "instructions": ("Be brief.", "messages", [{"role": "system", "content": "Be brief."}, *ASK]),
        "max_output_tokens": (3, "longest", 3),
        "stream": (True, "is_stream", True),
        "tools": ([{"type": "function", **FUNCTION}], "tools", [FUNCTION_TOOL]),
        "tool_choice": ({"type": "function", "name": "f"}, "constraints", "tool_choice"),
        "parallel_tool_calls": (False, "constraints", "parallel_tool_calls"),
        "reasoning": ({"effort": "high"}, "effort", "high"),
        "text": ({"format": {"type": "json_schema"}}, "constraints", "text.format"),
        "chat_template_kwargs": ({"a": 1}, "template", {"a": 1}),
        "include": (["message.output_text.logprobs"], "refused", "include"),
        "truncation": ("auto", "refused", "truncation"),
    },
    "messages": {
        "messages": ([{"role": "user", "content": "x"}], "messages", [{"role": "user", "content": "x"}]),
        "system": ("Be brief.", "messages", [{"role": "system", "content": "Be brief."}, *ASK]),
        "max_tokens": (3, "longest", 3),
        "stop_sequences": (["a"], "stop", ("a",)),
        "stream": (True, "is_stream", True),
        "tools": ([{"name": "f", "input_schema": FUNCTION["parameters"]}], "tools", [FUNCTION_TOOL]),
        "tool_choice": ({"type": "any"}, "constraints", "tool_choice"),
        "thinking": ({"type": "disabled"}, "thinks", False),
        "output_config": ({"effort": "low"}, "effort", "low"),
        "output_format": ({"type": "json_schema"}, "constraints", "output_format"),
    },
}


def fields(name: str) -> Any:
    return APIS[name][0].FIELDS


def ask(name: str, **more: Any) -> Any:
    """What the protocol reads in a request with these fields."""
    module, body = APIS[name]
    return module.read({**body, **more})


@pytest.mark.parametrize(("name", "kind"), CLIENTS)
def test_every_parameter_of_the_client_packages_is_known(name: str, kind: str) -> None:
    pytest.importorskip(kind.partition(".")[0])
    module, _, kind = kind.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    assert set(found.__annotations__) - fields(name).known == set()


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in APIS for field in fields(name).taken.split()])
def test_a_field_that_is_taken_does_what_it_says(name: str, field: str) -> None:
    value, attribute, wanted = TAKEN[name][field]
    if attribute == "refused":
        with pytest.raises(Refused, match=wanted):
            ask(name, **{field: value})
        return
    found = operator.attrgetter(attribute)(ask(name, **{field: value}))
    if attribute == "constraints":
        (constraint,) = found
        assert constraint.startswith(wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", APIS)
def test_other_fields(name: str) -> None:
    plain, known = ask(name), fields(name)
    for field in known.sampling.split():
        assert ask(name, **{field: 1}).ignored == (field,)
    for field in known.grammars.split():
        assert "grammar" in ask(name, **{field: "x"}).constraints[0]
    for field in set(known.bookkeeping.split()) - {"model"}:
        assert ask(name, **{field: "x"}) == plain
    for field, why in known.refused.items():
        with pytest.raises(Refused) as caught:
            ask(name, **{field: "x"})
        assert str(caught.value) == f"{field}: {why}"
        assert ask(name, **{field: None}) == plain
    for field in ("continue_final_message", "lora_path", "no_such_field"):
        with pytest.raises(Refused, match=f"{field}: no such field is known"):
            ask(name, **{field: True})


@pytest.mark.parametrize("name", APIS)
def test_docs_list_every_field(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
    assert [field for field in sorted(fields(name).known) if f"`{field}`" not in page] == []


def test_smaller_wishes() -> None:
    assert ask("messages", thinking={"type": "enabled", "budget_tokens": 1024}).ignored == ("thinking.budget_tokens",)
    assert ask("messages", thinking={"type": "adaptive"}).thinks is None
    one_call = {"type": "auto", "disable_parallel_tool_use": True}
    assert "disable_parallel_tool_use" in ask("messages", tool_choice=one_call).constraints[0]
    assert "output_config.format" in ask("messages", output_config={"format": {"type": "json_schema"}}).constraints[0]
    called: Any = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    thought: Any = {"type": "reasoning", "encrypted_content": "x", "summary": []}
    for name, field, value, message in (
        ("messages", "thinking", {"type": "often"}, "thinking.type is 'often'"),
        ("chat", "chat_template_kwargs", [1], "chat_template_kwargs is"),
        ("chat", "reasoning_effort", 3, "reasoning_effort is"),
        ("chat", "messages", [*ASK, called, *ASK], "function_call of a message"),
        ("responses", "input", [thought, *ASK], "encrypted"),
        ("responses", "input", [{"type": "item_reference", "id": "x"}], "an item of type 'item_reference'"),
    ):
        with pytest.raises(Refused, match=message):
            ask(name, **{field: value})


# ------------------------------------------------------------------------------------------------ thoughts
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments | tojson }}]"
    "{% endfor %}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}(){% endif %}{% endif %}"
)
EFFORT = "{{ reasoning_effort or 'medium' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def segments(template: str, **kwargs: Any) -> Segments:
    tokenizer = make_byte_tokenizer(1 << 16)
    tokenizer.chat_template = template
    return Segments(tokenizer, kwargs, Sample())


def prompt(found: Segments, asked: TurnRequest) -> str:
    return str(found.begun(asked, found.template_of(asked)).prompt)


CALL: dict[str, Any] = {"name": "f", "arguments": "{}"}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


TURNS: dict[str, list[Any]] = {
    "chat": [
        {"role": "assistant", "content": "", "reasoning": "I look."}
        | {"tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
        {"role": "assistant", "content": "It is.", "thinking": "So it is."},
    ],
    "responses": [
        reasoning("I look."),
        {"type": "function_call", "call_id": "1", **CALL},
        {"type": "function_call_output", "call_id": "1", "output": "wet"},
        reasoning("So it is."),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is."}]},
    ],
    "messages": [
        {
            "role": "assistant",
            "content": [thinking("I look."), {"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "wet"}]},
        {"role": "assistant", "content": [thinking("So it is."), {"type": "text", "text": "It is."}]},
    ],
}


@pytest.mark.parametrize("name", APIS)
def test_thoughts_of_earlier_turns_are_rendered_as_in_data(name: str) -> None:
    found = segments(THINKS)
    given = [*ASK, *TURNS[name], {"role": "user", "content": "Sure?"}]
    asked = ask(name, **{"input" if name == "responses" else "messages": given})
    of_data: Any = [
        *ASK,
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "wet"},
        {"role": "assistant", "content": "It is.", "reasoning_content": "So it is."},
        {"role": "user", "content": "Sure?"},
    ]
    wanted = render_prompt(of_data, found.tokenizer, PromptColumns("", apply_chat_template=True)).text
    assert prompt(found, asked) == wanted
    assert "(I look.)[f:{}]" in wanted and "(So it is.)It is." in wanted


# ------------------------------------------------------------------------------------------------ the template's words
def test_arguments_of_the_template() -> None:
    found, silent = segments(THINKS), segments("{{ messages[-1].content }}")
    for name, more, is_off in (
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, True),
        ("chat", {"reasoning_effort": "none"}, True),
        ("chat", {"reasoning_effort": "high"}, False),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}, True),
        ("messages", {"thinking": {"type": "disabled"}}, True),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, False),
        ("messages", {"thinking": {"type": "adaptive"}}, False),
        ("messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, True),
    ):
        asked = ask(name, **more)
        assert prompt(found, asked) == "<user>Hi</><assistant>" + "()" * is_off, more
        if asked.effort or asked.thinks is not None:
            with pytest.raises(ValueError, match="no argument that switches thoughts"):
                silent.template_of(asked)
    with pytest.raises(ValueError, match="no argument verbosity"):
        found.template_of(ask("chat", verbosity="low"))
    told = segments(EFFORT)
    assert prompt(told, ask("chat", reasoning_effort="high")).startswith("high<user>")
    assert prompt(told, ask("messages", output_config={"effort": "low"})).startswith("low<user>")
    assert prompt(told, ask("chat")).startswith("medium<user>")
    # A request's own arguments stand before the run's.
    off = segments(THINKS, enable_thinking=False)
    assert prompt(off, ask("chat")).endswith("()")
    assert not prompt(off, ask("chat", chat_template_kwargs={"enable_thinking": True})).endswith("()")
