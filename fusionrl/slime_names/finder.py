"""Let `import slime…` resolve to fusionrl's equivalents where slime is not installed.

The finder stands last in `sys.meta_path`, so an installed slime is found before it. A module that it makes is empty at
first: a name is looked up in the table, and imported, when it is asked for. So `import slime.utils.types` costs nothing
and imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from fusionrl.slime_names.entries import Absent, Here
from fusionrl.slime_names.table import ABSENT_MODULES, MODULES

ROOTS = ("slime", "slime_plugins")
TABLE_PAGE = "docs/from-slime.md"
_PACKAGES = {name.rpartition(".")[0] for name in (*MODULES, *ABSENT_MODULES)} | set(ROOTS)


def install() -> None:
    """Let this process import slime's names; doing it again changes nothing."""
    if not any(isinstance(one, SlimeFinder) for one in sys.meta_path):
        sys.meta_path.append(SlimeFinder())


def is_ours(name: str) -> bool:
    """Return whether `import name` gives the stand-in: slime itself, as a package with files, is not there."""
    root = sys.modules.get(name.partition(".")[0])
    # A folder named slime beside the program, without an __init__.py, is found as an empty package and hides nothing.
    return root is None or isinstance(root, SlimeModule) or getattr(root, "__file__", None) is None


class SlimeFinder:
    """Finds the modules of the table, after all other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of slime's, also of one that is absent here: its names say why."""
        if name.partition(".")[0] not in ROOTS or not is_ours(name):
            return None
        is_package = name in _PACKAGES or (name not in MODULES and _absent(name) is not None)
        return ModuleSpec(name, _Loader(), is_package=is_package) if is_package or name in MODULES else None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return SlimeModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__, {})
        public = [name for name, entry in names.items() if isinstance(entry, Here) and name[0] != "_"]
        module.__dict__["__all__"] = public


class SlimeModule(ModuleType):
    """A module under slime's name. Its names are looked up in the table when they are asked for."""

    def __getattr__(self, name: str) -> object:
        """Return what stands for the name here.

        Raises:
            ImportError: it does not exist here; with the reason and the cure. Not an AttributeError, for which
                `from slime.x import y` would show a text of Python's own.
        """
        own = self.__name__
        if name.startswith("__"):
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        entry = MODULES.get(own, {}).get(name)
        if isinstance(entry, Here):
            value = resolve(entry)
            self.__dict__[name] = value
            return value
        full_name = f"{own}.{name}"
        if entry is None and (full_name in MODULES or full_name in _PACKAGES):
            return importlib.import_module(full_name)
        absent = entry if isinstance(entry, Absent) or own in MODULES else _absent(full_name)
        if absent is not None:
            raise ImportError(f"{full_name} does not exist in fusionrl: {absent.told} ({TABLE_PAGE})", name=own)
        raise ImportError(
            f"{full_name} is not among slime's names that fusionrl knows ({TABLE_PAGE}); define it in your own file",
            name=own,
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES.get(self.__name__, {})})


def resolve(entry: Here) -> object:
    """Return the object that an entry of the table names."""
    module, _, name = entry.target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _absent(name: str) -> Absent | None:
    """Return why a module, or a package around it, is absent."""
    while name:
        if name in ABSENT_MODULES:
            return ABSENT_MODULES[name]
        name = name.rpartition(".")[0]
    return None
