"""The page of flags is made from the groups, and kept in docs/reference/flags.md."""

from __future__ import annotations

from pathlib import Path

from fusionrl.config.reference import render_reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "flags.md"


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m fusionrl.cli flags > docs/reference/flags.md"
    )


def test_every_row_of_a_table_has_four_cells() -> None:
    """A bar within a description would shift the row's cells."""
    rows = [line for line in render_reference().splitlines() if line.startswith("| `--")]
    assert len(rows) > 100
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
