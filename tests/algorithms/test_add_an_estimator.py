"""docs/internals/extend.md: its examples, applied to a copy of the package as they are written, work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "internals" / "extend.md").read_text(encoding="utf-8")
_FILES = re.compile(r"`(\w+\.py)`\s+in\s+`([\w/]+)/`:\n\n```python\n(.*?)```", re.DOTALL)
_LINES = re.compile(r"add a line to `ESTIMATORS`:\n\n```python\n(from .*?)\n\n(.*?)```", re.DOTALL)
FILES = {name: (folder, text) for name, folder, text in _FILES.findall(PAGE)}
PAGE_IS = "the example of docs/internals/extend.md is real:"
TAKE_ANOTHER = "take another example for the page"
TABLE = "ESTIMATORS: dict[str, Estimator] = {\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the page's files, and the page's lines in the table."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(REPO / "fusionrl", tree / "fusionrl")  # with what is compiled, which takes seconds
    for name, (folder, text) in FILES.items():
        assert not (REPO / folder / name).exists(), f"{PAGE_IS} {folder}/{name} exists now; {TAKE_ANOTHER}"
        (tree / folder).mkdir(parents=True, exist_ok=True)
        (tree / folder / name).write_text(text)
    path = tree / "fusionrl" / "algorithms" / "estimators.py"
    table = path.read_text()
    for imported, entry in _LINES.findall(PAGE):
        assert table.count(TABLE) == 1
        name = entry.split('"')[1]
        assert f'"{name}": ' not in table, f"{PAGE_IS} ESTIMATORS has {name!r} now; {TAKE_ANOTHER}"
        table = table.replace("\nimport numpy as np\n", f"\nimport numpy as np\n{imported}\n", 1)
        table = table.replace(TABLE, TABLE + entry)
    path.write_text(table)
    return tree


def run(tree: Path, *command: str) -> str:
    """What a command of the copy prints; it must end well."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tests_of_the_examples_and_of_the_table_pass(tree: Path) -> None:
    """Who adds an estimator has no list of the old ones to change."""
    shutil.copy(REPO / "tests" / "algorithms" / "test_tables.py", tree / "test_the_table.py")
    tests = ("tests/algorithms", "test_the_table.py")
    output = run(tree, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests)
    assert all(output.count(f"{name}::") for name in ("test_median.py", "test_fading.py", "test_the_table.py"))


def test_the_command_line_offers_them(tree: Path) -> None:
    page = run(tree, "-m", "fusionrl.cli", "flags")
    (estimators,) = [line for line in page.splitlines() if line.startswith("| `--advantage-estimator`")]
    (algorithms,) = [line for line in page.splitlines() if line.startswith("| `--algorithm`")]
    assert "`median`" in estimators and "`fading`" in estimators
    assert "`median`" in algorithms, "it has a preset"
    assert "`fading`" not in algorithms, "it has no preset"
