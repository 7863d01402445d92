"""docs/reference: flags.md is made from the groups; hooks.md has every hook, and its examples fit their hooks."""

import re
from pathlib import Path

import pytest

from fusionrl.config.hooks import SIGNATURES, check_hook, flag_of
from fusionrl.config.parser import render_reference

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (FOLDER / "hooks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# (--[\w-]+) \w+\.py:(\w+)\n(.*?)```", PAGE, re.DOTALL)
# README.md, docs/guides/rewards.md, and docs/guides/agents.md for both of the last
ELSEWHERE = {"rollout_function_path", "custom_rm_path", "tools_path", "agent_path"}


def test_the_page_of_flags_is_that_of_the_code() -> None:
    page, cure = render_reference(), "run: python -m fusionrl.cli flags > docs/reference/flags.md"
    assert (FOLDER / "flags.md").read_text(encoding="utf-8") == page, cure
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    assert len(rows) > 100
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows), "a bar in a description would shift cells"


def test_every_hook_is_on_its_page() -> None:
    assert {flag for flag, _, _ in EXAMPLES} == {flag_of(field) for field in SIGNATURES if field not in ELSEWHERE}
    table = PAGE.split("## Every hook")[1].split("\n## ")[0]
    assert all(f"| `{flag_of(field)}`" in table for field in SIGNATURES)


@pytest.mark.parametrize(("flag", "name", "code"), EXAMPLES, ids=[name for _, name, _ in EXAMPLES])
def test_an_example_fits_its_place(tmp_path: Path, flag: str, name: str, code: str) -> None:
    file = tmp_path / f"page_{name}.py"
    file.write_text(code)
    assert check_hook(flag[2:].replace("-", "_"), f"{file}:{name}") is None
