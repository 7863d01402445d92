"""Every slime name that fusionrl knows, from `names.md`, and a finder that resolves imports of `slime` to them.

The finder comes last in `sys.meta_path`, so an installed slime is found first. A module that it makes looks a name up
in the table, and imports it, when it is first used: `import slime.utils.types` imports neither torch nor Megatron.

Read against the public revision of August 2026, and against miles 31f1ca9, a fork that has all of these names, too. To
add a name, add a row, and copy the page to docs/reference/from-slime-names.md. A row names modules, names in them, and
where these are here: `module`, or `module:name` where the name is another one. Behind it stands how they differ;
without a place, why they are absent, and what to use instead. Any other name of a module is reported as unknown.
"""

import importlib
import sys
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from fusionrl.base.wording import codes, table_rows


@dataclass(frozen=True)
class Here:
    """A name that exists here."""

    target: str  # `module:name`
    differs: str = ""  # how its behaviour differs from slime's; empty: it is the same to a caller


@dataclass(frozen=True)
class Absent:
    """A name, or a whole module, that does not exist here."""

    why: str
    instead: str  # what to use or write in its place


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


ROOTS = ("slime", "slime_plugins")
FORKS = {"miles": "slime", "miles_plugins": "slime_plugins"}  # whose modules have slime's names, and more
TABLE_PAGE = "docs/guides/from-slime.md"


def _of_slime(name: str) -> str:
    """Return slime's name of a module, which a fork may have under a name of its own."""
    root, dot, rest = name.partition(".")
    return FORKS.get(root, root) + dot + rest


def _names_of(module: str) -> Names | None:
    """Return the names of a module; None for one that is in no table."""
    fork_names, slimes = MILES.get(module), MODULES.get(_of_slime(module))
    return None if fork_names is None and slimes is None else {**(slimes or {}), **(fork_names or {})}


_PACKAGES = {name.rpartition(".")[0] for name in (*MODULES, *ABSENT_MODULES, *MILES)} | {*ROOTS, *FORKS}


def _is_package(module: str) -> bool:
    """Return whether other modules are below a module."""
    known = _of_slime(module)
    return module in _PACKAGES or known in _PACKAGES or (known not in MODULES and _absent(known) is not None)


def _is_stand_in(name: str) -> bool:
    """Return whether `import name` gives the stand-in: slime itself is not installed."""
    root = sys.modules.get(name.partition(".")[0])
    # A folder named slime next to the program, without an __init__.py, is an empty namespace package and hides nothing.
    return root is None or isinstance(root, SlimeModule) or getattr(root, "__file__", None) is None


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a slime or miles module, also of one that is absent here: its names say why."""
    if not _is_stand_in(name):
        return None
    is_package = _is_package(name)
    is_known = is_package or _names_of(name) is not None
    return ModuleSpec(name, _Loader(), is_package=is_package) if is_known else None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return SlimeModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = _names_of(module.__name__) or {}
        public = [name for name, entry in names.items() if isinstance(entry, Here) and name[0] != "_"]
        module.__dict__["__all__"] = public


class SlimeModule(ModuleType):
    """A module under slime's name. Looks its names up in the table when they are first used."""

    def __getattr__(self, name: str) -> object:
        """Return the object that the name has here.

        Raises:
            ImportError: it does not exist here; with the reason and the cure. Not an AttributeError, for which
                `from slime.x import y` would hide the message.
        """
        module, names = self.__name__, _names_of(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        entry = (names or {}).get(name)
        if isinstance(entry, Here):
            value = resolve(entry)
            self.__dict__[name] = value
            return value
        full_name = f"{module}.{name}"
        if entry is None and (_names_of(full_name) is not None or full_name in _PACKAGES):
            return importlib.import_module(full_name)
        absent = entry if isinstance(entry, Absent) or names is not None else _absent(_of_slime(full_name))
        if absent is not None:
            raise ImportError(
                f"{full_name} does not exist in fusionrl: {absent.why}; {absent.instead} ({TABLE_PAGE})", name=module
            )
        raise ImportError(
            f"{full_name} is not among the names of {module.partition('.')[0]} that fusionrl knows ({TABLE_PAGE});"
            " define it in your own file",
            name=module,
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(_names_of(self.__name__) or {})})


def resolve(entry: Here) -> object:
    """Return the object that an entry of the table names."""
    module, _, name = entry.target.partition(":")
    return getattr(importlib.import_module(module), name)


def _absent(name: str) -> Absent | None:
    """Return why a module, or a package around it, is absent."""
    while name:
        if name in ABSENT_MODULES:
            return ABSENT_MODULES[name]
        name = name.rpartition(".")[0]
    return None
