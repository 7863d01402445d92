"""Every slime name that fusionrl knows, from `names.md`: module path → name → where it lives here, or why it does not.

No name of a module in `ABSENT_MODULES` exists; an error reports any other name as unknown. Read against the public
revision of August 2026, and against miles 31f1ca9, a fork that has all of these names, too. To add a name, add a row,
and copy the page to docs/reference/from-slime-names.md.

A row names modules, names in them, and where these are here: `module`, or `module:name` where the name is another one.
Behind it stands how they differ; without a place, why they are absent, and what to use or write instead.
"""

from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.wording import codes, table_rows


@dataclass(frozen=True)
class Here:
    """A name that exists here.

    target   `module:name`
    differs  how its behaviour differs from slime's; empty: it is the same to a caller
    """

    target: str
    differs: str = ""


@dataclass(frozen=True)
class Absent:
    """A name, or a whole module, that does not exist here.

    why      the reason
    instead  what to use or write in its place
    """

    why: str
    instead: str


Entry = Here | Absent
Names = dict[str, Entry]
PAGE = Path(__file__).with_name("names.md").read_text(encoding="utf-8")


def _entry(name: str, place: str, text: str) -> Entry:
    if not place:
        why, _, instead = text.removeprefix("no: ").partition("; instead: ")
        return Absent(why, instead)
    target = place if ":" in place else f"{place}:{name}"
    return Here(target, "" if text == "same" else text.removeprefix("differs: "))


def _read(page: str) -> tuple[dict[str, Names], dict[str, Absent]]:
    modules: dict[str, Names] = {}
    absent: dict[str, Absent] = {}
    for section, (module, *cells) in table_rows(page):
        if section:
            absent[module.strip("`")] = Absent(*cells)
            continue
        names, place, text = cells
        for path in codes(module):
            entries = {name: _entry(name, place.strip("`"), text) for name in codes(names)}
            modules.setdefault(path, {}).update(entries)
    assert modules and absent, "names.md lacks one of its tables"
    return modules, absent


_ALL, ABSENT_MODULES = _read(PAGE)
MODULES = {module: names for module, names in _ALL.items() if module.startswith("slime")}
MILES = {module: names for module, names in _ALL.items() if module.startswith("miles")}
