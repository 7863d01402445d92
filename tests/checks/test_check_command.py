"""`fusionrl data check`: every mistake of every kind, with its place, and what stands there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl import cli
from fusionrl.checks.data import DataCheck
from fusionrl.data.columns import PromptColumns
from fusionrl.data.findings import Finding, Findings

Rows = Callable[..., Path]
TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def test_everything_that_is_wrong_is_told_with_its_line(write_rows: Rows, tokenizer: Any) -> None:
    rows: list[tuple[Any, str]] = [
        ({"q": "1+1=", "a": "2"}, ""),
        ("{'q': 1}", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[1]", "no JSON object"),
        ({"p": "x", "a": "1"}, "column 'q' is missing; the columns are p, a"),
        ("", ""),
        ({"q": "  ", "a": "1"}, "column 'q' is empty"),
        ({"q": "x"}, "column 'a' is missing; the columns are q"),
        ({"q": "x", "a": "1", "metadata": [1]}, "column 'metadata' is not a JSON object"),
        ({"q": "12345678", "a": "1"}, "the prompt is longer than --rollout-max-prompt-len 7 (8 tokens)"),
        ({"q": "1+1=", "a": "2"}, ""),
        ({"q": "1+1=", "a": "3"}, "the same prompt as an earlier row, with another label (DATA: line 1)"),
    ]
    data = write_rows([row for row, _ in rows])
    check = DataCheck(PromptColumns("q", "a", max_prompt_len=7), tokenizer)
    found, warnings = check.problems(str(data))
    wanted = [f"DATA: line {number}: {text}" for number, (_, text) in enumerate(rows, 1) if text]
    assert [text.replace(str(data), "DATA") for text in found] == wanted
    assert warnings == [f"{data}: line 10: the same prompt as an earlier row ({data}: line 1)"]
    assert (check.num_rows, check.summary()) == (10, "10 rows, prompt tokens min 4 median 4 max 8")


def test_one_line_a_cause_with_the_count_and_the_first_rows(write_rows: Rows) -> None:
    data = write_rows([{"question": "1+1=", "answer": "2"}] * 1200 + ["x"] * 2)
    found, warnings = DataCheck(PromptColumns("prompt", "label")).problems(str(data))
    where = "in 1,200 of 1,202 rows (lines 1, 2, 3, …); the columns are question, answer"
    assert found == [
        f"{data}: column 'prompt' is missing {where}: --input-key question?",
        f"{data}: column 'label' is missing {where}: --label-key answer?",
        f"{data}: not valid JSON in 2 of 1,202 rows"
        " (lines 1201, 1202; line 1201: Expecting value: line 1 column 1 (char 0))",
    ]
    assert warnings == []


def test_many_causes_do_not_fill_the_screen(write_rows: Rows) -> None:
    findings = Findings("data")
    for number in range(1000):
        findings.add(f"line {number + 1}", Finding(f"cause {number}"))
    assert len(findings.errors) == 21 and findings.errors[-1] == "data: and 980 more causes"
    # Words of a row are in the detail, so that each row is not a cause of its own.
    data = write_rows([{"q": [{"role": f"bot{number}", "content": "x"}]} for number in range(100)])
    errors, (warning,) = DataCheck(PromptColumns("q", apply_chat_template=True)).problems(str(data))
    assert errors == []
    assert "a message's role is unusual in 100 of 100 rows (lines 1, 2, 3, …; line 1: 'bot0')" in warning


def test_duplicates_are_found_across_files(write_rows: Rows) -> None:
    check = DataCheck(PromptColumns("q", tool_key="t"))
    first, second = write_rows([{"q": "x"}, {"q": "y"}], "a.jsonl"), write_rows([{"q": "y"}], "b.jsonl")
    assert check.problems(str(first)) == ([], [])
    same = f"{second}: line 1: the same prompt as an earlier row ({first}: line 2)"
    assert check.problems(str(second)) == ([], [same])
    other_tools = write_rows([{"q": "y", "t": [{"name": "calc"}]}], "c.jsonl")
    assert check.problems(str(other_tools)) == ([], [])


def test_lengths_are_those_of_rendered_prompts(write_rows: Rows, tokenizer: Any) -> None:
    texts = ["a", "bcd", "efghi", "jklmnopqr"]
    check = DataCheck(PromptColumns("q", apply_chat_template=True), tokenizer)
    assert check.problems(str(write_rows([{"q": text} for text in texts]))) == ([], [])
    chats = [[{"role": "user", "content": text}] for text in texts]
    wanted = [len(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]
    assert check.lengths == wanted
    assert f"min {min(wanted)} median {np.median(wanted):g} max {max(wanted)}" in check.summary()


def test_conversations(write_rows: Rows, tokenizer: Any) -> None:
    check = DataCheck(PromptColumns("m"), tokenizer, is_sft=True)
    found, _ = check.problems(str(write_rows([{"m": TURNS}, {"m": TURNS[:1]}])))
    assert len(found) == 1 and "line 2: " in found[0] and "without an assistant turn" in found[0]
    prompt = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False).rstrip()
    num_prompt, num_tokens = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, whole))
    trained = num_tokens - num_prompt
    assert (check.lengths, check.num_trained) == ([num_tokens], [trained])
    assert f"trained min {trained} median {trained} max {trained}, {trained} in all" in check.summary()


def test_several_answers_to_one_prompt_are_several_samples(write_rows: Rows) -> None:
    tokens = {"tokens": [5, 6], "loss_mask": [0, 1]}
    sums = [{"q": "1+1=", "a": answer} for answer in ("2", "two", "2")]
    other = TURNS[:1] + [TURNS[1] | {"content": "z"}]
    chats = [{"q": TURNS, "a": "a label"}, {"q": other, "a": "a label"}, {"q": TURNS, "a": "another label"}]
    data = write_rows([*sums[:2], *chats, sums[2], sums[2] | tokens, {"q": "2+2=", "a": "4"} | tokens])
    first = f"lines 5, 6, 8; line 5: {data}: line 3"
    warning = f"{data}: the same sample as an earlier row in 3 of 8 rows ({first})"
    assert DataCheck(PromptColumns("q", "a"), is_sft=True).problems(str(data)) == ([], [warning])


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["data", "check", *argv])
    return code, *capsys.readouterr()


def test_the_command(write_rows: Rows, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_rows([{"q": "1+1=", "label": "2"}, {"q": "22+2=", "label": "4"}], "good.jsonl")
    flags = ("--input-key", "q", "--label-key", "label")
    assert run(capsys, str(good), *flags) == (0, "2 rows; no problems\n", "")
    with_tokens = (*flags, "--hf-checkpoint", str(tiny_model))
    assert run(capsys, str(good), *with_tokens)[1] == "2 rows, prompt tokens min 4 median 4.5 max 5; no problems\n"
    code, out, _ = run(capsys, str(good), f"x={good}@[1:]", *with_tokens, "--rollout-max-prompt-len", "4")
    assert code == 2
    assert out.splitlines() == [
        f"{good}: line 2: the prompt is longer than --rollout-max-prompt-len 4 (5 tokens)",
        f"x={good}@[1:]: line 2: the prompt is longer than --rollout-max-prompt-len 4 (5 tokens)",
        f"warning: x={good}@[1:]: line 2: the same prompt as an earlier row ({good}: line 2)",
        "3 rows, prompt tokens min 4 median 5 max 5; 2 problems, 1 warning",
    ]
    missing = "nowhere.jsonl: there is no such file\n2 rows; 1 problem\n"
    assert run(capsys, "--prompt-data", str(good), "nowhere.jsonl", *flags)[:2] == (2, missing)


def test_mistakes_on_the_command_line(write_rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(write_rows([{"input": "x"}]))
    for argv, part in (
        ((), "no file to check"),
        ((good, "--input-keys", "q"), "did you mean --input-key?"),
        ((good, "--rollout-max-prompt-len", "4"), "counting needs --hf-checkpoint"),
        ((good, "--hf-checkpoint", str(tmp_path)), "its tokenizer cannot be read"),
    ):
        code, out, err = run(capsys, *argv)
        assert code == 2 and out == "" and part in err, err
    assert cli.main(["data"]) == 2
    assert "usage: fusionrl data check FILE" in capsys.readouterr().out


def test_texts_without_positions_are_found_as_in_a_plan(
    write_rows: Rows, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tiny model has 2,048 positions, and a token for each byte; its tokenizer says it reads 512 tokens."""
    folder = shutil.copytree(tiny_model, write_rows([]).parent / "short")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 512}))
    chat = [TURNS[0], {"role": "assistant", "content": "y" * 2048}]
    response = ("--rollout-max-response-len", "9")
    for row, more, said in (
        ("x" * 2039, response, "2 rows, prompt tokens min 4 median 1021.5 max 2039; no problems"),
        ("x" * 2040, response, "line 2: a prompt of 2040 tokens + --rollout-max-response-len 9 = 2049, over the 2048"),
        ("x" * 2048, (), "line 2: a prompt of 2048 tokens leaves no room for a response in the 2048 positions"),
        (chat, ("--mode", "sft"), "line 2: it has more tokens than the 2048 positions"),
    ):
        data = write_rows([{"q": TURNS if row is chat else "1+1="}, {"q": row}])
        code = cli.main(["data", "check", str(data), "--hf-checkpoint", str(folder), "--input-key", "q", *more])
        out, err = capfd.readouterr()
        assert code == (0 if "no problems" in said else 2) and said in out and "indexing errors" not in out + err


@pytest.mark.parametrize("is_sft", [False, True])
def test_one_prompt_with_other_tools_is_another(is_sft: bool, write_rows: Rows) -> None:
    """In the metadata as in the column of tools, and as JSON text."""
    calendar, clock = ([{"type": "function", "function": {"name": name}}] for name in ("calendar", "clock"))
    turns = TURNS[: 1 + is_sft]
    rows = [{"q": turns, "a": "1", "metadata": {"tools": calendar}}, {"q": turns, "a": "2", "t": clock}]
    columns = PromptColumns("q", "a", tool_key="t", apply_chat_template=not is_sft)
    assert DataCheck(columns, None, is_sft).problems(str(write_rows(rows))) == ([], [])
    rows.append({"q": turns, "a": "1", "t": json.dumps(clock)})
    errors, warnings = DataCheck(columns, None, is_sft).problems(str(write_rows(rows)))
    assert ["line 3" in text for text in errors + warnings] == [True]
