"""Rows of JSON text: a key that stands twice is refused, and numbers stay what they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fusionrl.data.rows import DuplicateKey, read_array, read_lines


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1, "\\u0061": 2}',
        '{"a": "say \\":", "b": 2, "b": 3}',
        '{"a": [{"b": 1}, {"b": 1, "b": 2}]}',
    ],
)
def test_a_key_that_stands_twice_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\n", encoding="utf-8")
    ((_, found),) = read_lines(path)
    assert isinstance(found, DuplicateKey)
    path.write_text(f'[{{"a": 1}}, {line}, {{"a": 2}}]', encoding="utf-8")
    first, bad, last = (row for _, row in read_array(path))
    assert (first, last) == ({"a": 1}, {"a": 2}) and isinstance(bad, DuplicateKey), "reading goes on behind it"


def test_numbers_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"a": 123456789012345678901234567890, "b": -9223372036854775809, "c": 1e999, "d": NaN, "e": 0.1}\n'
    )
    ((_, row),) = read_lines(path)
    assert isinstance(row, dict)
    assert (row["a"], row["b"], row["e"]) == (123456789012345678901234567890, -9223372036854775809, 0.1)
    assert row["c"] == math.inf and math.isnan(row["d"])
