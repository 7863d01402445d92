"""Imports of large libraries: without garbage collection, without noise, without scans, or not before they are used.

`imported_later` puts a stand-in in a module's place while others import it: its functions import the real module when
they are called. Who imports the module afterwards gets the real one, and so do modules that have imported a name from
the stand-in. `cached_scans` keeps what transformers finds out at each import by opening the 2,400 files of its models
and the records of all installed packages: a second of a core in each process that reads a tokenizer.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, TypeVar

from fusionrl.base.files import cache_path, file_fact, read_cache, write_cache


@contextmanager
def without_collections() -> Iterator[None]:
    """Import large libraries within it.

    torch, transformers and SGLang make a million objects that live as long as the process. The collector looks through
    all of them again and again while they are made: a fifth of the time. Afterwards it never looks at them, nor at what
    else lives at this moment; so nothing is done where everything was imported before.
    """
    is_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if is_enabled:
            gc.enable()


@contextmanager
def imported_later(
    name: str, called: Sequence[str] = (), caught: Sequence[str] = (), constants: Sequence[str] = ()
) -> Iterator[None]:
    """Import what imports module `name` within it. Nothing is done where the module is imported already.

    called     functions and classes of it that the importing modules only call
    caught     its errors that they only catch, and that no other module raises
    constants  its texts that they read only where another module has imported it
    """
    if name in sys.modules:
        yield
        return
    if name not in _stand_ins:
        _stand_ins[name] = _StandIn(name, called, caught, constants)
        # It stays: the module may be imported at any time.
        sys.meta_path.insert(0, AfterImport(name, _stand_ins[name].replace))
    sys.modules[name] = stand_in = _stand_ins[name]
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


_stand_ins: dict[str, _StandIn] = {}  # by the name of the module


def when_imported(name: str, function: Callable[[types.ModuleType], None]) -> None:
    """Call `function` with module `name`: now if it is imported, else as soon as it is."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, function))


class _StandIn(types.ModuleType):
    def __init__(self, name: str, called: Sequence[str], caught: Sequence[str], constants: Sequence[str]) -> None:
        super().__init__(name)
        self.taken: dict[str, object] = {attribute: functools.partial(_call, name, attribute) for attribute in called}
        self.taken |= {attribute: type(attribute, (RuntimeError,), {"__module__": name}) for attribute in caught}
        self.taken |= {attribute: f"{name}.{attribute}" for attribute in constants}

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.taken[name] if name in self.taken else getattr(_real(self.__name__), name)

    def replace(self, real: types.ModuleType) -> None:
        """Put the real names wherever this one's were taken."""
        for module in list(sys.modules.values()):
            held = vars(module) if isinstance(module, types.ModuleType) else {}
            for name, value in self.taken.items():
                if held.get(name) is value:
                    held[name] = getattr(real, name)
        self.taken = {}


def _call(module: str, name: str, *args: object, **kwargs: object) -> object:
    return getattr(_real(module), name)(*args, **kwargs)


def _real(name: str) -> types.ModuleType:
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]
    return importlib.import_module(name)


class AfterImport(MetaPathFinder):
    """Finds one module as usual, and calls a function with it when it has been imported."""

    def __init__(self, name: str, function: Callable[[types.ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module; all others are for the other finders."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = loader = _Loader(spec.loader.name, spec.loader.path)
        loader.function = self._function
        return spec


class _Loader(SourceFileLoader):
    function: Callable[[types.ModuleType], None]

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        self.function(module)


T = TypeVar("T")
_ScanResult = dict[frozenset[str], dict[str, set[str]]]
"""As transformers has it: needed packages → module → names in it."""
_FORM = "2"  # of the files


@contextmanager
def cached_scans() -> Iterator[None]:
    """Import transformers within it. Nothing is done where it is imported already, or is being imported."""
    if "transformers" in sys.modules:
        yield
        return
    original, finder = (
        importlib.metadata.packages_distributions,
        AfterImport("transformers.utils.import_utils", _cache_scan),
    )
    importlib.metadata.packages_distributions = functools.partial(_distributions, original)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = original


def _distributions(original: Callable[[], Mapping[str, list[str]]]) -> Mapping[str, list[str]]:
    """As `importlib.metadata.packages_distributions`: top-level module → packages that have it."""
    return _cached("packages", _record_facts(), original, dict, lambda content: dict(content.items()))


def _record_facts() -> Iterator[str]:
    """Yield facts of all installed packages, in the order in which they are found: of the folders of their records.
    Raises FileExistsError if an entry of sys.path is an archive, whose packages no folder tells."""
    for folder in sys.path:
        if os.path.isfile(folder):
            raise FileExistsError(folder)
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder or ".") as found:  # it is not there, or cannot be read
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info", ".egg")):
                with contextlib.suppress(OSError):  # a link that leads nowhere; the entries after it count
                    yield file_fact(os.path.abspath(entry.path), entry.stat())


def _cache_scan(module: types.ModuleType) -> None:
    """Let `define_import_structure` of `transformers.utils.import_utils` keep its answer for the folder of models."""
    usual = getattr(module, "define_import_structure", None)
    if not callable(usual):
        return
    source = Path(str(module.__file__))
    models = str(source.parents[1] / "models")

    @functools.cache
    def of_models() -> _ScanResult:
        facts = itertools.chain((file_fact(path, path.stat()) for path in [source]), _source_facts(models))
        return _cached("transformers-models", facts, lambda: usual(models), _scan_to_json, _scan_from_json)

    @functools.wraps(usual)
    def scan(module_path: str | Path, prefix: str | None = None) -> _ScanResult:
        folder = os.path.dirname(module_path) if os.path.isfile(module_path) else str(module_path)
        if folder != models:
            answer: _ScanResult = usual(module_path, prefix)
            return answer
        start = "" if prefix is None else f"{prefix}."
        return {
            needed: {start + name: set(names) for name, names in modules.items()}
            for needed, modules in of_models().items()
        }

    vars(module)["define_import_structure"] = scan


def _source_facts(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        sorted_entries = sorted(entries, key=lambda entry: entry.name)
    for entry in sorted_entries:
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _source_facts(entry.path)
        elif entry.name.endswith(".py"):
            yield file_fact(entry.path, entry.stat())


def _scan_to_json(scan: _ScanResult) -> list[object]:
    return [
        [sorted(needed), {name: sorted(names) for name, names in modules.items()}] for needed, modules in scan.items()
    ]


def _scan_from_json(content: Any) -> _ScanResult:
    if not isinstance(content, list):
        raise TypeError(content)
    return {frozenset(needed): {name: set(names) for name, names in modules.items()} for needed, modules in content}


def _cached(
    name: str,
    facts: Iterable[str],
    find_out: Callable[[], T],
    to_json: Callable[[T], object],
    from_json: Callable[[Any], T],
) -> T:
    """Return an answer that is valid for these facts: from its file, or found out and kept.

    `from_json` raises TypeError, ValueError or AttributeError for what `to_json` has not made.
    """
    try:
        path = cache_path(name, [_FORM, *facts])
    except (RuntimeError, OSError):  # a user without a home; a file that goes at this moment; an archive
        return find_out()
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # there is none, or of another form
        if answer := from_json(read_cache(path)):  # an empty one is damaged: every scan finds something
            return answer
    answer = find_out()
    with contextlib.suppress(OSError, TypeError, ValueError, AttributeError):  # another transformers': not kept
        plain = to_json(answer)
        if from_json(json.loads(json.dumps(plain))) == answer:
            write_cache(path, plain)
    return answer


@contextmanager
def quiet() -> Iterator[None]:
    """Show no Python warnings, and no log records up to WARNING, of what is imported or called within.

    Megatron-core warns at its import of each package that it does without, transformers of long texts.
    """
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
