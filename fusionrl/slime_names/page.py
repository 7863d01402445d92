"""The page of slime's names, written from the table: `python -m fusionrl.slime_names.page`."""

from __future__ import annotations

from fusionrl.slime_names.entries import Absent, Entry
from fusionrl.slime_names.miles import MILES
from fusionrl.slime_names.table import ABSENT_MODULES, MODULES

_HEAD = """# Names of slime

Names that begin with `miles` exist only in that fork. It has all others as `miles.…`.
Made by `python -m fusionrl.slime_names.page`; a test holds it against the code. [Moving from slime](from-slime.md) says
how they are resolved. *Same* means: a function that uses the name runs unchanged.

| name | here | |
|---|---|---|
"""
_MODULES = """
## Modules that are not here

| module | why | instead |
|---|---|---|
"""


def render_names() -> str:
    """The page as Markdown."""
    modules = [*MODULES.items(), *MILES.items()]
    rows = [_row(module, name, entry) for module, names in modules for name, entry in names.items()]
    absent = [f"| `{module}` | {_cell(one.why)} | {_cell(one.instead)} |\n" for module, one in ABSENT_MODULES.items()]
    return _HEAD + "".join(rows) + _MODULES + "".join(absent)


def _row(module: str, name: str, entry: Entry) -> str:
    if isinstance(entry, Absent):
        return f"| `{module}.{name}` | no | {_cell(entry.why)}; instead: {_cell(entry.instead)} |\n"
    said = f"differs: {entry.differs}" if entry.differs else "same"
    return f"| `{module}.{name}` | `{entry.target.replace(':', '.')}` | {_cell(said)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render_names(), end="")
