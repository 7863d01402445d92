"""The page of slime's flags is made from the tables, and kept in docs/reference/from-slime-flags.md."""

from __future__ import annotations

from pathlib import Path

from fusionrl.compat.slime.flags.page import render_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "from-slime-flags.md"


def test_the_page_is_that_of_the_code() -> None:
    command = "python -m fusionrl.cli from-slime --flags > docs/reference/from-slime-flags.md"
    assert PAGE.read_text(encoding="utf-8") == render_page(), f"run: {command}"


def test_rows_have_the_cells_of_their_table() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    wanted = 0
    for line in lines:
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert not cells or not wanted or cells == wanted, line
        wanted = cells
