"""The page of the fifteen usual troubles: each has a line and names tests that exist. What they do is not checked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PAGE = (REPO / "docs" / "guides" / "understand.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (\d+) ([^|]+) \| ([^|]+) \| \[(\d+)\]\(#tests-(\d+)\) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_of_the_fifteen_has_a_line() -> None:
    rows = _ROW.findall(PAGE)
    assert [int(row[0]) for row in rows] == list(range(1, 16))
    assert all(row[0] == row[3] == row[4] and row[1].strip() and row[2].strip() for row in rows)
    assert PAGE.count("\n### ") == len(rows)


@pytest.mark.parametrize("number", range(1, 16))
def test_its_tests_exist(number: int) -> None:
    section = PAGE.split(f"### tests {number}\n")[1].split("\n### ")[0]
    named = _TEST.findall(section)
    assert named and len(named) == section.count("::"), section
    for file, function in named:
        tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in there and function.startswith("test_"), f"{file} has no {function}"
