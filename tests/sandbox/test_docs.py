"""The two pages of the sandbox name every escape, every cheat and every reason."""

from __future__ import annotations

from fusionrl.rewards.code_run import REASONS
from tests.rewards.cheats import CHEATS
from tests.sandbox.escapes import ESCAPES
from tests.sandbox.users import REPO


def test_the_page_names_every_program_and_reason() -> None:
    cells = [
        cell.strip().removesuffix(" *").strip("`")
        for folder in ("guides", "results")
        for line in (REPO / "docs" / folder / "sandbox.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    ]
    for name in (*(escape.name for escape in ESCAPES), *CHEATS, *REASONS):
        assert name in cells, name
