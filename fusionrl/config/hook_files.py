"""Import a hook given as `path/to/file.py`, and the modules next to it.

The file finds its neighbours as if Python ran it as a script, or as a part of its package:

    my_task/generate.py        from calc_tool import evaluate      my_task/calc_tool.py
                               from .calc_tool import evaluate     the same module
    my_pkg/rewards/score.py    from ..common import parse          my_pkg/common.py; each folder has an __init__.py
                               from my_pkg.common import parse     the same module
    examples/task/generate.py  from examples.task.tool import run  examples/task/tool.py, in folders without one

Modules of a folder belong to its hooks alone: their full name is `fusionrl_hooks_<hash of the folder>.calc_tool`,
the same in every process, so what a hook makes can be pickled in one and read in another (`register_folder`). A module
next to a hook hides a standard one from the hook's other files; within a package, installed modules go first. What
Python finds by itself, because the folder is in sys.path, keeps its own name: no module is loaded twice.
"""

import builtins
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType

_PREFIX = "fusionrl_hooks_"
STAND_INS = ("slime", "miles")  # installed, or `fusionrl.compat.slime.names`; never a folder next to a hook
_STAND_IN_ROOTS = (*STAND_INS, "slime_plugins", "miles_plugins")
_folders: dict[str, Path] = {}  # name of the package that represents a folder → the folder
_files: dict[str, Path] = {}  # full module name of a hook's file → the file
_elsewhere: set[tuple[str, str]] = set()  # (importing package, name): imported from outside of the hook's folder


def import_file(path: Path) -> ModuleType:
    """The module of a hook's file; loaded once a process, by whichever path it is named."""
    file = path.resolve()
    if file.suffix != ".py":
        raise ValueError(f"{str(path)!r} is not a Python file")
    folder, name = _place(file)
    if "." in name and _is_found_by_python(name, folder, file):
        return importlib.import_module(name)
    full_name = f"{register_folder(file)}.{name}"
    _files[full_name] = file
    return importlib.import_module(full_name)


def register_folder(path: Path) -> str:
    """Let this process import the modules next to the hook's file `path`; returns the name of their package."""
    return _register(_place(path.resolve())[0])


def _register(folder: Path) -> str:
    package = _PREFIX + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    _folders[package] = folder
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return package


def find_beside(name: str) -> str:
    """Return the full name of a module that hooks' files know as `name`: of a package next to them, or `name` itself.

    A hook that loads a function by its path, as slime's do, may name its neighbours: "examples.agents.solve". Python
    finds them first.
    """
    top = name.partition(".")[0]
    if top in sys.modules or top in STAND_INS or _spec(top) is not None:
        return name
    packages = (package for package, folder in _folders.items() if _stands_in(folder, top))
    module = name.rpartition(".")[0]
    package = next(packages, None) or next(filter(None, (_around(package, module) for package in list(_folders))), None)
    return name if package is None else f"{package}.{name}"


def _around(package: str, name: str) -> str | None:
    """Return the package of a folder around a hook's, if the module `name` is in it, on the way to the hook.

    A name without a dot is none: a folder often has the name of the package for which it has hooks.
    """
    top, *inner = name.split(".")
    for folder in (_folders[package.partition(".")[0]], *_folders[package.partition(".")[0]].parents):
        path = folder.joinpath(*inner)
        if inner and folder.name == top and (path.is_dir() or path.with_name(f"{path.name}.py").is_file()):
            return _register(folder.parent)
    return None


def _stands_in(folder: Path, top: str) -> bool:
    return (folder / top).is_dir() or (folder / f"{top}.py").is_file()


def _place(file: Path) -> tuple[Path, str]:
    """(folder around the file's outermost package, dotted name in it); for a file of no package its own folder."""
    parts = [] if file.stem == "__init__" else [file.stem.replace(".", "_")]
    folder = file.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts or ["__init__"])


def _is_found_by_python(name: str, folder: Path, file: Path) -> bool:
    top = name.partition(".")[0]
    # In this order: to look for a part of a package, Python runs the package's __init__.py.
    return _origin(top) == folder / top / "__init__.py" and _origin(name) == file


def _origin(name: str) -> Path | None:
    """The file that `import name` would load; None where there is none."""
    spec = _spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # no such package; a module without a spec, as __main__
        return None


def install_stand_ins() -> None:
    """Let this process import slime's and miles' names where they are not installed; a second call changes nothing."""
    if _STAND_IN_FINDER not in sys.meta_path:
        sys.meta_path.append(_STAND_IN_FINDER)


class _StandInFinder:
    """Finds slime's modules after all other finders, and imports the wing `compat` for them alone."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _STAND_IN_ROOTS:
            return None
        from fusionrl.compat.slime.names import find_spec

        return find_spec(name)


class _Finder:
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        if name in _folders:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(_folders[name])]
            return spec
        if name in _files:
            return importlib.util.spec_from_file_location(name, _files[name], loader=_Loader(name, str(_files[name])))
        kinds = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES))
        specs = (FileFinder(entry, *kinds).find_spec(name) for entry in path or ())
        return next((spec for spec in specs if spec is not None), None)


_FINDER = _Finder()
_STAND_IN_FINDER = _StandInFinder()


class _Importlib(ModuleType):
    """`importlib` for a module of hooks, in `package`: `import_module` finds what is next to it first."""

    def __init__(self, package: str, importer: str) -> None:
        super().__init__("importlib")
        self._package, self._importer = package, importer

    def __getattr__(self, name: str) -> object:
        return getattr(importlib, name)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        if name.startswith("."):
            return importlib.import_module(name, package)
        home = _home_or_around(name, self._package) if self._package else None
        if home is None or self._importer == f"{home}.{name.partition('.')[0]}":
            return importlib.import_module(find_beside(name))
        return importlib.import_module(f"{home}.{name}")


_importlib_for = functools.cache(_Importlib)


class _Loader(SourceFileLoader):
    """Runs a module whose import statements search its own folder first.

    An import statement calls `__import__` of its module's builtins; the module gets builtins of its own for that.
    """

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


def _import(
    name: str,
    globals: dict[str, object] | None = None,
    locals: dict[str, object] | None = None,
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    package = str((globals or {}).get("__package__") or "")
    top = name.partition(".")[0]
    importer = str((globals or {}).get("__name__"))
    if not level and (name == "importlib" or (top == "importlib" and not fromlist)):
        builtins.__import__(name, globals, locals, fromlist)  # also modules of it that the list names
        return _importlib_for(package, importer)
    if level or not package or (package, top) in _elsewhere:
        return builtins.__import__(name, globals, locals, fromlist, level)
    home = _home_or_around(name, package)
    if home is not None and importer == f"{home}.{top}":  # openai.py, which imports openai
        return builtins.__import__(name, globals, locals, fromlist, level)
    if home is None:
        module = builtins.__import__(name, globals, locals, fromlist, level)
        _elsewhere.add((package, top))
        return module
    if fromlist:
        return builtins.__import__(f"{home}.{name}", globals, locals, fromlist, 0)
    importlib.import_module(f"{home}.{name}")
    return sys.modules[f"{home}.{top}"]


def _home_or_around(name: str, package: str) -> str | None:
    """Return the package in which a module of `package` finds `name`; None: it is imported as anywhere else."""
    top = name.partition(".")[0]
    home = _home(top, package)
    return _around(package, name) if home is None and top not in STAND_INS and _spec(top) is None else home


def _home(top: str, package: str) -> str | None:
    """The package in which the module `top` stands: that of the importing module, or that of its outermost folder.

    None: it is imported as anywhere else. A folder without an __init__.py counts where no other module is found.
    """
    if top in STAND_INS:
        return None  # a slime checkout next to its examples does not count as installed
    for home in dict.fromkeys((package, package.partition(".")[0])):
        if (full_name := f"{home}.{top}") in sys.modules:
            return home
        spec = _FINDER.find_spec(full_name, sys.modules[home].__path__)
        if spec is None:
            continue
        # Python searches a module's own package only for relative imports; here it is searched second.
        if home.count(".") and _spec(top) is not None and _origin(top) != Path(spec.origin or "").resolve():
            continue
        if spec.origin is None:  # a folder alone
            return None if _spec(top) is not None or top in sys.modules else home
        return None if _origin(top) == Path(spec.origin).resolve() else home
    return None
