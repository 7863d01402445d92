"""Rows of JSON text: the quick reader and the strict one agree, and both refuse a key that stands twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionrl.data.row_checks import value_problem
from fusionrl.data.strict_json import (
    CleanRow,
    DuplicateKey,
    StrictDecoder,
    quick_row,
    quick_rows,
    read_array,
    read_lines,
    table_row,
)

texts = st.text(st.sampled_from('ab":\\ \t{}[],é\x00\ud800😀'), max_size=6)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts
values = st.recursive(scalars, lambda one: st.lists(one, max_size=3) | st.dictionaries(texts, one, max_size=3))


def write(pairs: list[tuple[str, Any]], spaced: bool, ascii_only: bool) -> str:
    """An object as text, of which a key may stand twice; `spaced` writes white space around colons."""
    colon = " : " if spaced else ": "
    parts = [
        json.dumps(key, ensure_ascii=ascii_only) + colon + json.dumps(value, ensure_ascii=ascii_only)
        for key, value in pairs
    ]
    return "{" + ", ".join(parts) + "}"


def same(one: Any, other: Any) -> bool:
    """Equal with their types; NaN is equal to itself."""
    return repr(one) == repr(other)


@given(st.lists(st.tuples(texts, values), max_size=5), st.booleans(), st.booleans())
def test_the_quick_reader_agrees_with_the_strict_one(
    pairs: list[tuple[str, Any]], spaced: bool, ascii_only: bool
) -> None:
    line = write(pairs, spaced, ascii_only).encode("utf-8", "surrogatepass")
    quick = quick_row(line)
    if quick is None:
        return  # the strict reader reads it
    strict = StrictDecoder().parse(line.decode())
    assert same(dict(quick), strict)
    assert len({key for key, _ in pairs}) == len(pairs)
    assert value_problem(strict) is None
    array = b"[" + line + b"," + line + b"]"
    assert quick_rows(array) == [quick, quick]
    assert type(table_row(strict)) is CleanRow


@given(st.dictionaries(texts, values, max_size=4))
def test_a_row_of_a_table_is_clean_where_its_values_are(row: dict[str, Any]) -> None:
    if type(table_row(row)) is CleanRow:
        problems = [value_problem(value) for value in row.values()]
        # Arrow's texts are UTF-8, so that half a character cannot stand in one.
        assert all(problem is None or "half a character" in problem[0] for problem in problems)


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1, "a": 2}',
        '{"a":1,"a" :2}',
        '{"a":1, "a"\t:2}',
        '{"a": 1, "\\u0061": 2}',
        '{"a\\\\": 1, "b": 2, "b": 3}',
        '{"a": "say \\":", "b": 2, "b": 3}',
        '{"a": ":", "b": 1, "b": 2}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": [{"b": 1}, {"b": 1, "b": 2}]}',
        '{"": 1, "": 2}',
    ],
)
def test_a_key_that_stands_twice_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    assert quick_row(line.encode()) is None
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    ((_, found),) = read_lines(path)
    assert isinstance(found, DuplicateKey)
    path.write_text(f'[{{"a": 1}}, {line}, {{"a": 2}}]', encoding="utf-8")
    first, bad, last = (row for _, row in read_array(path))
    assert (first, last) == ({"a": 1}, {"a": 2}) and isinstance(bad, DuplicateKey), "reading goes on behind it"


def test_ordinary_rows_are_read_quickly(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Is 1:1 the same as 1?", "label": "yes", "metadata": {"share": 0.5, "id": 7}},
        {"prompt": [{"role": "user", "content": 'print("a": 1)\n\té \\ '}], "label": None},
    ]
    for ascii_only in (True, False):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows), encoding="utf-8")
        read = [row for _, row in read_lines(path)]
        assert read == rows and all(type(row) is CleanRow for row in read)
        path.write_text(json.dumps(rows[1:] * 2, ensure_ascii=ascii_only), encoding="utf-8")
        read = [row for _, row in read_array(path)]
        assert read == rows[1:] * 2 and all(type(row) is CleanRow for row in read)


def test_numbers_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"a": 123456789012345678901234567890, "b": -9223372036854775809, "c": 1e999, "d": NaN, "e": 0.1}\n'
    )
    ((_, row),) = read_lines(path)
    assert isinstance(row, dict) and type(row) is not CleanRow
    assert (row["a"], row["b"], row["e"]) == (123456789012345678901234567890, -9223372036854775809, 0.1)
    assert row["c"] == math.inf and math.isnan(row["d"])
