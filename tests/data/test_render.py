"""One conversation, written in several ways, is rendered in one; a field that a template leaves out is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.checks.data import DataCheck
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import check_file, load_conversations, load_prompts, template_probe
from fusionrl.data.render import normal_form, render_messages
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.sample import Sample
from fusionrl.data.supervised import MultiTurnLossMaskGenerator, conversation_to_sample
from fusionrl.data.tokenizer import TokenizerFiles
from tests.tiny_model import make_byte_tokenizer
from tools import render_conversations

TEMPLATE = (
    "{% if tools %}You may call {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Rows = Callable[..., Path]
USER = {"role": "user", "content": "Weather in Oslo?"}
ARGUMENTS = {"city": "Oslo"}


def tokenizer_with(template: str) -> Any:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def call(arguments: object, **more: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}], **more}


@pytest.mark.parametrize(
    "message",
    [
        call(json.dumps(ARGUMENTS)),
        {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": '{"city":"Oslo"}'}]},
        call(json.dumps(ARGUMENTS), refusal=None, reasoning_content=None, function_call=None),
        call(ARGUMENTS, content=[]),
    ],
)
def test_one_call_in_each_spelling_of_data_sets_and_clients(message: dict[str, Any]) -> None:
    text = render_messages(tokenizer_with(TEMPLATE), [USER, message]).text
    assert text.endswith('<|im_start|>assistant\n<tool_call>weather {"city": "Oslo"}</tool_call><|im_end|>\n')
    masks = MultiTurnLossMaskGenerator(tokenizer_with(TEMPLATE))
    sample = conversation_to_sample([USER, message], masks)
    trained = masks.tokenizer.decode(sample.tokens[sample.prompt_length :])
    assert trained == '<tool_call>weather {"city": "Oslo"}</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("ids", "names"),
    [(("a", "b"), ["weather", "time"]), ((None, None), [None, None]), ((["a"], ["b"]), ["weather", "time"])],
)
def test_the_name_of_the_tool_that_answers(ids: tuple[object, object], names: list[str | None]) -> None:
    """An answer to one of two calls without an id has no name."""
    calls = [{"id": id, "function": {"name": name}} for id, name in zip(ids, ("weather", "time"), strict=True)]
    answers = [{"role": "tool", "content": "rain", "tool_call_id": id} for id in ids]
    messages = normal_form([USER, {"role": "assistant", "tool_calls": calls}, *answers])
    assert [message.get("name") for message in messages[2:]] == names
    one = normal_form([{"role": "assistant", "tool_calls": calls[:1]}, {**answers[0], "content": "x"}])
    assert one[1]["name"] == "weather"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_under_each_of_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "Rain.", name: "It is Oslo."}
    assert "<think>It is Oslo.</think>Rain." in render_messages(tokenizer_with(TEMPLATE), [USER, message]).text
    flag = {"role": "assistant", "content": "Rain.", "thinking": True}
    assert "<think>" not in render_messages(tokenizer_with(TEMPLATE), [USER, flag]).text
    blind = tokenizer_with(TEMPLATE.replace("m.reasoning_content", "false"))
    blind.name_or_path = "blind-model"
    with pytest.raises(ValueError, match=f"template of blind-model does not render '{name}' of a message"):
        MultiTurnLossMaskGenerator(blind).get_loss_mask([USER, message])


@pytest.mark.parametrize("arguments", [{}, ARGUMENTS, "not JSON of Oslo"])
def test_a_call_that_is_left_out_is_named_though_its_words_are_elsewhere(arguments: object) -> None:
    """As by LFM2's template: the tools have the name and the keys, the question has the values."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    question = {"role": "user", "content": "Weather in Oslo? not JSON of Oslo"}
    messages = [question, call(arguments), {"role": "tool", "content": "rain"}]
    assert "<tool_call>" in render_messages(tokenizer_with(TEMPLATE), messages, tools).text
    blind = tokenizer_with(TEMPLATE.replace("m.tool_calls or []", "[]"))
    for conversation in (messages, [USER, call({"town": "Rome"})]):
        with pytest.raises(ValueError, match="does not render 'tool_calls' of a message"):
            render_messages(blind, conversation, tools)


QUOTING = ("content", "reasoning", "tool", "schema")


@pytest.mark.parametrize("quoting", QUOTING)
def test_a_text_may_quote_arguments_as_python_prints_them(quoting: str) -> None:
    """Tools in Python often answer so; the call is still an object, and a template that prints it is found out."""
    quote = f"weather({ARGUMENTS!r})"
    asked, thought, answer, told = (quote if quoting == place else "-" for place in QUOTING)
    messages = [{**USER, "content": asked}, call(ARGUMENTS, reasoning=thought), {"role": "tool", "content": answer}]
    tools = [{"type": "function", "function": {"name": "weather", "description": told}}]
    rendered = render_messages(tokenizer_with(TEMPLATE), messages, tools)
    assert '<tool_call>weather {"city": "Oslo"}</tool_call>' in rendered.text and quote in rendered.text
    printing = TEMPLATE.replace("call.function.arguments | tojson", "call.function.arguments")
    assert '<tool_call>weather {"city": "Oslo"}' in render_messages(tokenizer_with(printing), messages, tools).text


@pytest.mark.parametrize("weight", [0, 0.0, 1])
def test_the_weight_of_a_turn(weight: float) -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer_with(TEMPLATE))
    first = {"role": "assistant", "content": "A1", "weight": weight}
    tokens, mask = masks.get_loss_mask([USER, first, USER, {"role": "assistant", "content": "A2"}])
    text = masks.get_text_from_loss_mask(tokens, mask)
    assert text == ([] if weight == 0 else ["A1<|im_end|>"]) + ["A2<|im_end|>"]
    with pytest.raises(ValueError, match="step_loss_mask and weight of a message differ"):
        masks.get_loss_mask([USER, {"role": "assistant", "content": "A", "weight": 0, "step_loss_mask": 1}])


def test_a_column_of_structs_has_the_fields_that_each_row_wrote(tmp_path: Path, write_rows: Rows) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    rows: list[dict[str, Any]] = [
        {"messages": [USER, call({"a": "x"})], "tools": tools, "metadata": {"level": 1, "box": {"p": 1}}},
        {"messages": [USER, call({"b": "y"})], "tools": [], "metadata": {"hint": "h", "box": {"q": 2}}},
        {"messages": [USER, {"role": "assistant", "content": "Rain."}], "tools": None, "metadata": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tokenizer = tokenizer_with(TEMPLATE)
    columns = PromptColumns("messages", metadata_key="metadata", tool_key="tools", apply_chat_template=True)

    def texts(samples: list[Sample]) -> list[tuple[dict[str, Any], str]]:
        prompts = ((sample.prompt, sample.metadata.get("tools"), sample.metadata) for sample in samples)
        return [(data, p if isinstance(p, str) else render_messages(tokenizer, p, t).text) for p, t, data in prompts]

    of_table, of_lines = (
        (texts(load_conversations(path, columns).samples), texts(load_prompts(path, tokenizer, columns).samples))
        for path in (tmp_path / "rows.parquet", write_rows(rows))
    )
    assert of_table == of_lines
    for (metadata, text), *_ in of_table:
        assert '<tool_call>weather {"a": "x"}</tool_call>' in text and metadata["box"] == {"p": 1}
    assert "None" not in str(of_table) and "null" not in str(of_table)


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"', "[1]", "Oslo"])
def test_arguments_that_are_no_json_are_named_before_the_run(arguments: str, write_rows: Rows) -> None:
    data = write_rows([{"messages": [USER, call(arguments)]}])
    errors, _ = DataCheck(PromptColumns("messages"), is_sft=True).problems(str(data))
    assert len(errors) == 1 and "arguments of a tool call are text, but not JSON of an object" in errors[0]


def test_tools_of_the_metadata_are_rendered_as_those_of_a_column(write_rows: Rows) -> None:
    tokenizer, tools = tokenizer_with(TEMPLATE), [{"type": "function", "function": {"name": "weather"}}]
    columns = PromptColumns("messages", tool_key="tools", apply_chat_template=True)
    spellings: list[dict[str, Any]] = [
        {"tools": tools},
        {"metadata": {"tools": tools}},
        {"metadata": json.dumps({"tools": tools})},
        {"tools": tools, "metadata": {"tools": [{"name": "other"}]}},
    ]
    data = write_rows([{"messages": [USER], **row} for row in spellings])
    prompts = [sample.prompt for sample in load_prompts(data, tokenizer, columns).samples]
    assert len(set(prompts)) == 1 and 'You may call [{"type": "function"' in prompts[0]
    check = DataCheck(columns, tokenizer)
    check.problems(str(data))
    assert check.lengths == [len(tokenizer.encode(prompts[0]))] * 4
    data = write_rows([{"messages": [USER, {"role": "assistant", "content": "Rain."}], **row} for row in spellings])
    assert [sample.metadata["tools"] for sample in load_conversations(data, columns).samples] == [tools] * 4


@pytest.mark.parametrize("value", [["weather"], "weather", [], None, {"name": "weather"}])
def test_another_value_called_tools_is_the_users_own(value: object, write_rows: Rows) -> None:
    data = write_rows([{"messages": [USER], "metadata": {"tools": value}}])
    columns = PromptColumns("messages", apply_chat_template=True)
    sample = load_prompts(data, tokenizer_with(TEMPLATE), columns).samples[0]
    assert "You may call" not in str(sample.prompt) and sample.metadata == {"tools": value}


@pytest.mark.parametrize("prompt", [[USER], "Weather in Oslo?"])
def test_a_refusal_of_a_rows_tools_is_found_before_the_run(prompt: object, write_rows: Rows) -> None:
    template = TEMPLATE.replace("{% if tools %}", "{% if tools %}{{ raise_exception('no tools here') }}")
    rows = [{"messages": prompt, "metadata": {"tools": tools}} for tools in ([], [], [{"name": "weather"}])]
    errors, _ = findings(write_rows(rows), template, PromptColumns("messages", apply_chat_template=True))
    assert len(errors) == 1 and "line 3: " in errors[0] and "no tools here" in errors[0]


EACH_PART = "{% for p in m.content %}{{ p.text }}{% endfor %}"
PARTS = [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Oslo?"}]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{{ m.content }}", "Weather\nin Oslo?"),  # would print a list as Python does
        ("{{ m.content | tojson if m.content is not string else m.content }}", "Weather\nin Oslo?"),
        ("{{ m.content + '' }}", "Weather\nin Oslo?"),  # raises for a list
        ("{% if m.content is string %}{{ m.content }}{% else %}" + EACH_PART + "{% endif %}", "Weatherin Oslo?"),
        ("{% for p in m.content %}[{{ p.text }}]{% endfor %}", "[Weather][in Oslo?]"),
    ],
)
def test_a_template_that_renders_parts_joins_them(content: str, wanted: str) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}"
    for role in ("user", "system", "tool"):
        text = render_messages(tokenizer_with(template), [{"role": role, "content": PARTS}]).text
        assert text == f"<|im_start|>{role}\n{wanted}<|im_end|>\n"


def test_what_transformers_renders_whole_is_rendered_so() -> None:
    """Of each template that trl ships, and conversations in the form that templates document."""
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    result = {"role": "tool", "content": "rainy", "tool_call_id": "call00001", "name": "weather"}
    turn = call(ARGUMENTS, content="")
    turn["tool_calls"][0]["id"] = "call00001"
    rain = {"role": "assistant", "content": "Rain."}
    conversations: list[tuple[list[dict[str, Any]], Any, tuple[str, ...]]] = [
        ([USER, rain], None, ("Weather in Oslo?", "Rain.")),
        ([{"role": "system", "content": "Short."}, USER], None, ("Short.", "Weather in Oslo?")),
        ([{"role": "user", "content": PARTS}], None, ("Weather", "in Oslo?")),
        ([USER, turn, result], tools, ("Weather in Oslo?", "weather", "city", "rainy")),
        ([USER, rain | {"reasoning_content": "Hmm."}], None, ("Hmm.", "Rain.")),
    ]
    num_same = 0
    tokenizer = make_byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    for path in templates.glob("*.jinja"):
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        for messages, used, texts in conversations:
            asks = messages[-1]["role"] != "assistant"
            try:
                text = tokenizer.apply_chat_template(messages, tools=used, tokenize=False, add_generation_prompt=asks)
            except Exception:  # a template may raise anything
                continue
            if all(part in text for part in texts) and "{'" not in text and '{"type": "text"' not in text:
                num_same += 1
                assert render_messages(tokenizer, messages, used, for_answer=asks).text == text, path.stem
    assert num_same > 200


LLAMA = TEMPLATE.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
BLIND = TEMPLATE.replace("{% if m.reasoning_content %}", "{% if false %}")


@pytest.mark.parametrize(
    ("template", "message", "field"),
    [
        (LLAMA, call(ARGUMENTS, content="I look."), "content beside tool_calls"),
        (BLIND, {"role": "assistant", "content": "Rain.", "reasoning": "Hmm."}, "reasoning"),
    ],
)
def test_a_prompt_may_lose_what_servers_leave_out(
    template: str, message: dict[str, Any], field: str, write_rows: Rows
) -> None:
    tokenizer, columns = tokenizer_with(template), PromptColumns("messages", apply_chat_template=True)
    data = write_rows([{"messages": [USER, message, USER]}])
    assert len(load_prompts(data, tokenizer, columns).samples) == 1
    errors, warnings = findings(data, template, columns)
    assert errors == [] and len(warnings) == 1 and f"does not render {field!r} of a message" in warnings[0]
    with pytest.raises(ValueError, match=f"does not render '{field}' of a message"):
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask([USER, message])


@pytest.mark.parametrize("lost", ["m.role == 'user'", "m.role == 'system'", "m.role == 'tool'"])
def test_a_prompt_may_not_lose_what_others_said(lost: str, write_rows: Rows) -> None:
    template = TEMPLATE.replace("{{ m.content }}", "{% if not " + lost + " %}{{ m.content }}{% endif %}")
    turns = [{"role": "system", "content": "S"}, USER, call(ARGUMENTS), {"role": "tool", "content": "rain"}]
    data, columns = write_rows([{"messages": turns}]), PromptColumns("messages", apply_chat_template=True)
    with pytest.raises(ValueError, match="line 1: the chat template of .* does not render 'content' of a message"):
        load_prompts(data, tokenizer_with(template), columns)
    errors, warnings = findings(data, template, columns)
    assert len(errors) == 1 and warnings == []


def test_tools_that_a_users_function_renders_are_a_warning(write_rows: Rows) -> None:
    template = TEMPLATE.replace("{% if tools %}", "{% if false %}")
    data = write_rows([{"messages": [USER], "tools": [{"name": "weather"}]}])
    columns = PromptColumns("messages", tool_key="tools", apply_chat_template=True)
    with pytest.raises(ValueError, match="does not render tools"):
        load_prompts(data, tokenizer_with(template), columns)
    assert len(findings(data, template, columns)[0]) == 1
    columns = replace(columns, keeps_messages=True)
    assert load_prompts(data, tokenizer_with(template), columns).samples[0].metadata == {"tools": [{"name": "weather"}]}
    errors, warnings = findings(data, template, columns)
    assert errors == [] and len(warnings) == 1 and "does not render tools ('weather')" in warnings[0]


def findings(data: Path, template: str, columns: PromptColumns) -> tuple[list[str], list[str]]:
    """Errors and warnings of a plan."""
    files = TokenizerFiles({"default": template}, {}, ())
    probe = template_probe(files, columns, lambda: tokenizer_with(template))
    found = check_file(data, "--prompt-data", RowChecker(columns, probe=probe))
    return found.errors, found.warnings


@pytest.mark.parametrize("value", ["it's", "a\\b", 'say "x"', "two\nlines", "Zürich 中文"])
def test_arguments_that_a_template_quotes(value: str) -> None:
    quoted = r"""{{ "'" + call.function.arguments.city | replace('\\', '\\\\') | replace("'", "\\'") + "'" }}"""
    template = TEMPLATE.replace("{{ call.function.arguments | tojson }}", f"city={quoted}")
    for text in (TEMPLATE, template):
        render_messages(tokenizer_with(text), [USER, call({"city": value})])
    with pytest.raises(ValueError, match="does not render 'tool_calls'"):
        render_messages(tokenizer_with(template.replace(".city", ".city[1:]")), [USER, call({"city": value})])


def test_every_conversation_has_one_rendering_or_a_refusal_that_names_the_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr("sys.argv", ["render_conversations.py", "--verbose"])
    assert render_conversations.main() == 0
    lines = capsys.readouterr().out.splitlines()
    words = lines[-1].split()
    assert int(words[0]) >= 200 and int(words[2]) >= 500 and lines[-1].endswith(" 0 with two renderings")
    refusals = [line for line in lines if line.startswith("    ")]
    names = ("does not render", "refuses it (", "as Python prints")
    assert refusals and all(any(name in line for name in names) for line in refusals), refusals
