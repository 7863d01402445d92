"""Prompts from files: rendered, tokenized, with labels and metadata; nothing is skipped in silence."""

import copy
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.columns import AdapterColumn, PromptColumns
from fusionrl.data.prompts import check_file, load_conversations, load_prompts
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.rows import read_rows

Rows = Callable[..., Path]


def test_texts_messages_labels_and_metadata(tokenizer: Any, write_rows: Rows) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rows = [
        {"q": "1+1=", "a": "2", "metadata": {"level": 1}},
        {"q": chat, "a": 4, "tools": [{"name": "calc"}]},
        {"q": "1+2=", "a": "3", "tools": []},
    ]
    columns = PromptColumns("q", "a", tool_key="tools", apply_chat_template=True)
    with pytest.raises(ValueError, match=r"line 2: the chat template .* does not render tools \('calc'\)"):
        load_prompts(write_rows(rows), tokenizer, columns)
    tools = "{% if tools is not none and tools is defined %}{{ tools | map(attribute='name') | join }}\n{% endif %}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tools + tokenizer.chat_template
    loaded = load_prompts(write_rows(rows), tokenizer, columns)
    first, second, third = loaded.samples
    assert first.prompt == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    turns = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt == "calc\n" + turns
    assert first.prompt_tokens is not None
    assert tokenizer.decode(first.prompt_tokens) == first.prompt
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == first.prompt_tokens[0]
    assert third.prompt == first.prompt.replace("1+1", "1+2")
    assert [sample.metadata for sample in loaded.samples] == [{"level": 1}, {"tools": [{"name": "calc"}]}, {}]
    assert (first.label, second.label) == ("2", 4)
    assert first.messages == [{"role": "user", "content": "1+1="}]


def test_without_a_template_the_text_stands_as_it_is(tokenizer: Any, write_rows: Rows) -> None:
    loaded = load_prompts(write_rows([{"q": " 1+1="}]), tokenizer, PromptColumns("q"))
    assert loaded.samples[0].prompt == " 1+1="
    assert loaded.samples[0].messages is None
    with pytest.raises(ValueError, match="add --apply-chat-template"):
        load_prompts(write_rows([{"q": [{"role": "user", "content": "x"}]}]), tokenizer, PromptColumns("q"))
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(write_rows([{"q": "x"}]), types.SimpleNamespace(), PromptColumns("q", apply_chat_template=True))


def test_prompts_that_are_too_long_are_counted(tokenizer: Any, write_rows: Rows) -> None:
    data = write_rows([{"q": "x" * n} for n in (3, 4, 5, 6)])
    loaded = load_prompts(data, tokenizer, PromptColumns("q", max_prompt_len=4))
    assert [s.prompt for s in loaded.samples] == ["xxx", "xxxx"]
    assert loaded.num_too_long == 2
    with pytest.raises(ValueError, match=r"no prompt is left \(4 are over --rollout-max-prompt-len\)"):
        load_prompts(data, tokenizer, PromptColumns("q", max_prompt_len=2))


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"x\.parquet: reading it needs the package pyarrow"):
        list(read_rows(tmp_path / "x.parquet"))


def test_a_prompt_of_megabytes_is_too_long_without_counting_its_tokens(tokenizer: Any, write_rows: Rows) -> None:
    encoded: list[str] = []
    counting = types.SimpleNamespace(
        chat_template=None, encode=lambda text, **kwargs: encoded.append(text) or tokenizer.encode(text, **kwargs)
    )
    data = write_rows([{"q": "x"}, {"q": "1+" * 5_000_000}, {"q": "y"}])
    loaded = load_prompts(data, counting, PromptColumns("q", max_prompt_len=512))
    assert ([sample.prompt for sample in loaded.samples], loaded.num_too_long) == (["x", "y"], 1)
    assert encoded == ["x", "y"]
    with pytest.raises(ValueError, match=r"line 2: column 'q' has more than 1,000,000 characters \(10,000,000\)"):
        load_prompts(data, counting, PromptColumns("q"))
    # A long prompt that may be short in tokens is counted.
    assert load_prompts(write_rows([{"q": "x" * 2000}]), tokenizer, PromptColumns("q", max_prompt_len=2000)).samples


def test_rows_name_their_adapters(tokenizer: Any, write_rows: Rows) -> None:
    """By a column, by the metadata, or by the name of their set; a row without one, or with another, is a finding."""
    columns = PromptColumns("q", adapters=AdapterColumn("lora", ("math", "code")))
    rows = [{"q": "1", "lora": "code"}, {"q": "2", "metadata": {"lora": "math"}}, {"q": "3", "lora": None}]
    path = write_rows(rows)
    assert [s.adapter for s in load_prompts(f"math={path}", tokenizer, columns).samples] == ["code", "math", "math"]
    with pytest.raises(ValueError, match=r"line 3: no adapter: column 'lora' \(--adapter-key\) .*has math, code"):
        load_prompts(path, tokenizer, columns)
    findings = check_file(write_rows([*rows, {"q": "4", "lora": "Code"}]), "--prompt-data", RowChecker(columns))
    assert len(findings.errors) == 2 and "line 4" in findings.errors[1] and "'Code'" in findings.errors[1]
    sample = load_conversations(write_rows([{"q": "1", "a": "2", "lora": "code"}]), replace(columns, label_key="a"))
    assert sample.samples[0].adapter == "code"
