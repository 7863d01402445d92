"""transformers imported without reading all of its model files, and the records of all installed packages, each time.

transformers opens the 2,400 files of its models to know which class is in which of them, and reads the list of files of
every installed package: a second of a core in each process that reads a tokenizer. The answers are kept
(`cache_files.py`), named by the sizes and times of the files and folders that they came from.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fusionrl.base.cache_files import Json, cache_path, file_fact, read_cache, write_cache
from fusionrl.base.lazy_modules import AfterImport

T = TypeVar("T")
Structure = dict[frozenset[str], dict[str, set[str]]]
"""As transformers has it: needed packages → module → names in it."""

_TRANSFORMERS, _IMPORT_UTILS, _SCAN = "transformers", "transformers.utils.import_utils", "define_import_structure"
_FORM = "2"  # of the files


@contextmanager
def cached_scans() -> Iterator[None]:
    """Import transformers within it. Nothing is done where it is imported already, or is being imported."""
    if _TRANSFORMERS in sys.modules:
        yield
        return
    original, finder = importlib.metadata.packages_distributions, AfterImport(_IMPORT_UTILS, _put_scan)
    importlib.metadata.packages_distributions = functools.partial(_distributions, original)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = original


# ---------------------------------------------------------------------------------------- names of packages
def _distributions(original: Callable[[], Mapping[str, list[str]]]) -> Mapping[str, list[str]]:
    """As `importlib.metadata.packages_distributions`: top-level module → packages that have it."""
    return _cached("packages", _record_facts(), original, dict, _as_distributions)


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


def _as_distributions(content: Json) -> dict[str, list[str]]:
    if not isinstance(content, dict):
        raise TypeError(content)
    return {
        name: [str(package) for package in packages] for name, packages in content.items() if isinstance(packages, list)
    }


# ---------------------------------------------------------------------------------------- names in models' files
def _put_scan(module: types.ModuleType) -> None:
    """Put `_Scan` into `transformers.utils.import_utils`, which has been imported."""
    if callable(original := getattr(module, _SCAN, None)):
        setattr(module, _SCAN, _Scan(original, Path(str(module.__file__))))


class _Scan:
    """In the place of transformers' function; only the folder of all models is another's answer."""

    def __init__(self, original: Callable[..., Structure], source: Path) -> None:
        """`source`: the file with the usual function."""
        self._usual, self._source = original, source
        self._models = str(source.parents[1] / "models")
        self._structure = functools.lru_cache(1)(self._kept_structure)

    def __call__(self, module_path: str | Path, prefix: str | None = None) -> Structure:
        """As the usual function: of a folder, or of that of a file."""
        folder = os.path.dirname(module_path) if os.path.isfile(module_path) else str(module_path)
        if folder != self._models:
            return self._usual(module_path, prefix)
        start = "" if prefix is None else f"{prefix}."
        return {
            needed: {start + module: set(names) for module, names in modules.items()}
            for needed, modules in self._structure().items()
        }

    def _kept_structure(self) -> Structure:
        facts = itertools.chain((file_fact(path, path.stat()) for path in [self._source]), _source_facts(self._models))
        return _cached("transformers-models", facts, lambda: self._usual(self._models), _to_json, _as_structure)


def _source_facts(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        sorted_entries = sorted(entries, key=lambda entry: entry.name)
    for entry in sorted_entries:
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _source_facts(entry.path)
        elif entry.name.endswith(".py"):
            yield file_fact(entry.path, entry.stat())


def _to_json(structure: Structure) -> list[list[object]]:
    return [
        [sorted(needed), {module: sorted(names) for module, names in modules.items()}]
        for needed, modules in structure.items()
    ]


def _as_structure(content: Any) -> Structure:
    """Read what `_to_json` wrote; of another form: a TypeError, a ValueError or an AttributeError."""
    if not isinstance(content, list):
        raise TypeError(content)
    return {frozenset(needed): {module: set(names) for module, names in modules.items()} for needed, modules in content}


# ---------------------------------------------------------------------------------------- the files
def _cached(
    name: str,
    facts: Iterable[str],
    find_out: Callable[[], T],
    to_json: Callable[[T], object],
    from_json: Callable[[Json], T],
) -> T:
    """Return an answer that is valid for these facts: from its file, or found out and kept."""
    try:
        path = cache_path(name, [_FORM, *facts])
    except (RuntimeError, OSError):  # a user without a home; a file that goes at this moment; an archive
        return find_out()
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # there is none, or of another form
        return from_json(read_cache(path))
    answer = find_out()
    with contextlib.suppress(OSError, TypeError, ValueError, AttributeError):  # another transformers': not kept
        plain = to_json(answer)
        if from_json(json.loads(json.dumps(plain))) == answer:
            write_cache(path, plain)
    return answer
