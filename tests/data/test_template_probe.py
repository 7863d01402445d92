"""What is known of a tokenizer without loading it: its template, its special tokens, and what the template refuses."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import special_tokens_of, template_probe
from fusionrl.data.tokenizer import TemplateProbe, TokenizerFiles, read_tokenizer_files
from tests.tiny_model import make_byte_tokenizer
from tools.make_quickstart import build_tokenizer

USER, ANSWER = {"role": "user", "content": " 1+1=\n"}, {"role": "assistant", "content": "<think>\n1\n</think>\n\n2"}
FUNCTION = {"name": "add", "description": "Adds <two> numbers", "parameters": {"type": "object", "required": ["a"]}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Add."}, USER],
    [USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "2", "name": "add"}],
    [USER, USER],
    [ANSWER],
    [{"role": "judge", "content": "x"}],
]


def text_or_error(render: Any, messages: Any, tools: Any) -> Any:
    """What it renders, or the kind of what it raises."""
    try:
        return render(messages, tools)
    except Exception as error:
        return type(error)


def test_it_renders_as_the_tokenizer_does(tmp_path: Path) -> None:
    """Templates of public models, as TRL's package carries them."""
    folder, tokenizer = Path(pytest.importorskip("trl").__file__).parent / "chat_templates", make_byte_tokenizer()
    flags = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    tokenizer.save_pretrained(tmp_path)
    for template in folder.glob("*.jinja"):
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        (tmp_path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
        probe = TemplateProbe(
            read_tokenizer_files(tmp_path), {"enable_thinking": False}, lambda *_: pytest.fail("not needed")
        )
        for messages, tools in itertools.product(CONVERSATIONS, (None, TOOLS)):
            wanted = text_or_error(lambda m, t: tokenizer.apply_chat_template(m, tools=t, **flags), messages, tools)
            assert text_or_error(probe.render, messages, tools) == wanted, template


@pytest.mark.parametrize("make", [build_tokenizer, make_byte_tokenizer])
def test_special_tokens_and_template_are_read_from_the_files(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    files = read_tokenizer_files(tmp_path)
    assert files.special_tokens == special_tokens_of(tokenizer)
    assert files.template(has_tools=False) == tokenizer.chat_template
    assert files.named_tokens["eos_token"] == tokenizer.eos_token


def test_files_of_other_forms(tmp_path: Path) -> None:
    assert read_tokenizer_files(tmp_path) == TokenizerFiles({}, {}, ())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],'
        ' "bos_token": {"content": "<s>"}, "additional_special_tokens": ["<x>", {"content": "<y>"}],'
        ' "added_tokens_decoder": {"7": {"content": "<z>", "special": true}, "8": {"content": "n", "special": false}}}'
    )
    files = read_tokenizer_files(tmp_path)
    assert (files.template(has_tools=False), files.template(has_tools=True)) == ("A", "B")
    assert files.special_tokens == ("<s>", "<x>", "<y>", "<z>")
    for broken in ("[", "[]", '{"added_tokens": 3}', "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        (tmp_path / "tokenizer.json").write_text(broken)
        assert read_tokenizer_files(tmp_path) == TokenizerFiles({}, {}, ())


def test_one_row_of_each_shape_is_rendered() -> None:
    refused: list[Any] = []

    def confirm(messages: Any, tools: Any) -> Exception | None:
        refused.append(messages)
        return ValueError("the roles do not fit")

    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    probe = TemplateProbe(TokenizerFiles({"default": template}, {}, ()), {}, confirm)
    for number in range(5):
        assert probe.refusal(("user",), [{"role": "user", "content": str(number)}], None) is None
        refusal = probe.refusal(("system",), [{"role": "system", "content": "x"}], None)
        assert str(refusal) == "the roles do not fit"
    assert len(refused) == 1


def test_the_tokenizer_has_the_last_word(tiny_model: Path, tokenizer: Any) -> None:
    """What the files alone seem to refuse is taken where the loaded tokenizer takes it."""
    files = read_tokenizer_files(tiny_model)
    strict = TokenizerFiles({"default": "{{ raise_exception('no') }}"}, {}, files.special_tokens)
    probe = template_probe(strict, PromptColumns("q", apply_chat_template=True), lambda: tokenizer)
    assert probe is not None and probe.refusal("text", [USER], None) is None
    parts = [{"role": "user", "content": [{"type": "image", "text": "1+1="}]}]
    assert "as Python prints them" in str(probe.refusal("parts", parts, None))
    assert template_probe(files, PromptColumns("q"), lambda: tokenizer) is None
