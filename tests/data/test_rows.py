"""What `--prompt-data` may name: files of each format, folders of Hugging Face data sets, and slices of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import load_prompts
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.rows import PromptSet, parse_set, parse_sets, read_lines, read_rows, scan_rows

# Five rows as split `train` in two shards, and rows 4 and 0 of them as `test`, by `save_to_disk` of datasets 5.2.0.
SAVED = Path(__file__).parent / "saved_by_datasets"
Rows = Callable[..., Path]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("a.jsonl", PromptSet(Path("a.jsonl"))),
        ("x/a.jsonl@[0:1000]", PromptSet(Path("x/a.jsonl"), None, 0, 1000)),
        ("math=a.jsonl@[-5:]", PromptSet(Path("a.jsonl"), None, -5, None, "math")),
        ("a.jsonl@[:]", PromptSet(Path("a.jsonl"))),
        ("runs/lr=1/a.jsonl@[:-1]", PromptSet(Path("runs/lr=1/a.jsonl"), None, None, -1)),
        (f"hf={SAVED}:test@[1:]", PromptSet(SAVED, "test", 1, None, "hf")),
        ("x:y.jsonl", PromptSet(Path("x:y.jsonl"))),
    ],
)
def test_a_set_is_named_in_one_text(spec: str, wanted: PromptSet) -> None:
    assert parse_set(spec) == wanted


def test_a_file_that_exists_is_a_path_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b@[1:2].jsonl").write_text('{"q": 1}\n')
    assert list(read_rows("a=b@[1:2].jsonl")) == [("line 1", {"q": 1})]


def test_names() -> None:
    assert [one.name for one in parse_sets(["x/gsm 8k.jsonl", "x/v1.2", "m=x/gsm 8k.jsonl", f"{SAVED}:train"])] == [
        *("gsm-8k", "v1-2", "m", "saved_by_datasets-train")
    ]
    with pytest.raises(ValueError, match=r"--prompt-data: two sets have the name 'a'; name them, as in NAME=PATH"):
        parse_sets(["x/a.jsonl", "y/a.jsonl"])


bounds = st.none() | st.integers(-9, 9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(start=bounds, stop=bounds)
def test_a_slice_is_pythons(start: int | None, stop: int | None, write_rows: Rows) -> None:
    numbers = list(range(6))
    data = write_rows(["", *({"q": number} for number in numbers), "", {"q": 6}])
    spec = f"{data}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    found = list(read_rows(spec))
    assert [row["q"] for _, row in found] == [*numbers, 6][start:stop]
    assert all(place == f"line {row['q'] + 2 + (row['q'] == 6)}" for place, row in found), "places are the file's"


def test_a_bad_line_outside_the_slice_is_not_read(write_rows: Rows) -> None:
    data = write_rows([{"q": 0}, "{", {"q": 2}])
    assert list(read_rows(f"{data}@[2:]")) == [("line 3", {"q": 2})]
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        list(read_rows(f"{data}@[1:]"))


def test_a_folder_of_datasets(tokenizer: Any) -> None:
    pytest.importorskip("pyarrow")
    wanted = [
        {"input": [{"role": "user", "content": f"{i}+1="}], "label": str(i + 1), "metadata": {"level": i}}
        for i in range(5)
    ]
    assert [row for _, row in read_rows(f"{SAVED}:train")] == wanted
    assert [row for _, row in read_rows(f"{SAVED}:test")] == [wanted[4], wanted[0]]
    assert list(read_rows(SAVED / "train")) == [(f"row {i}", row) for i, row in enumerate(wanted, start=1)]
    assert list(read_rows(f"{SAVED}:train@[-2:]")) == [("row 4", wanted[3]), ("row 5", wanted[4])]
    loaded = load_prompts(f"{SAVED}:test", tokenizer, PromptColumns("input", "label", apply_chat_template=True))
    assert loaded.samples[0].prompt == "<|im_start|>user\n4+1=<|im_end|>\n<|im_start|>assistant\n"
    assert (loaded.samples[0].label, loaded.samples[0].metadata) == ("5", {"level": 4})


def test_metadata_and_tools_may_be_json_as_text(tokenizer: Any, write_rows: Rows) -> None:
    """A column of a table has one type, so that differing objects stand there as text."""
    columns = PromptColumns("q", tool_key="t")
    loaded = load_prompts(write_rows([{"q": "x", "metadata": '{"a": 1}', "t": '[{"n": 2}]'}]), tokenizer, columns)
    assert loaded.samples[0].metadata == {"a": 1, "tools": [{"n": 2}]}


def test_a_message_is_checked_as_a_whole_and_its_role_once() -> None:
    checker = RowChecker(PromptColumns("q", apply_chat_template=True))
    message = {"role": "user", "content": "  "}
    assert [finding.cause for finding in checker.findings({"q": [message]})] == ["column 'q' is empty"]
    assert checker.findings({"q": [message | {"name": "me"}]}) == []
    (finding,) = checker.findings({"q": [{"role": "a\0", "content": "x"}]})
    assert "is not one word" in finding.cause


def test_numbers_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 12345678901234567890, "b": -9223372036854775809, "c": 1e999, "d": NaN, "e": 0.1}\n')
    ((_, row),) = read_lines(path)
    assert isinstance(row, dict) and math.isnan(row.pop("d"))
    assert list(row.values()) == [12345678901234567890, -9223372036854775809, math.inf, 0.1]


@pytest.mark.parametrize("line", ['{"a": 1, "\\u0061": 2}', '{"a": "x\\":", "b": 2, "b": 3}'])
def test_a_key_that_stands_twice_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n', encoding="utf-8")
    first, bad, last = (row for _, row in scan_rows(str(path), ""))
    assert (first, last) == ({"a": 1}, {"a": 2}) and isinstance(bad, ValueError), "reading continues behind it"
