"""The name, or the path, that a mistyped one may have meant."""

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the one of `names` that a mistyped `word` may have meant; None: none is close.

    Letters in another order (gpro) are likelier than other letters; `cutoff` is that of `difflib.get_close_matches`.
    """
    known = list(names)
    turned = [name for name in known if name != word and sorted(name) == sorted(word)]
    return next(iter(turned or difflib.get_close_matches(word, known, 1, cutoff)), None)


def existing_parent(path: Path) -> tuple[Path, str]:
    """Return the deepest folder of `path` that exists, and the first part that does not."""
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    return parent, path.absolute().relative_to(parent).parts[0]


def names_in(folder: Path, is_wanted: Callable[[Path], bool]) -> list[str]:
    """List the names in a folder that are wanted and not hidden; none of a folder that cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".") and is_wanted(entry))
    except OSError:
        return []


def nearest(path: Path, is_wanted: Callable[[Path], bool] = Path.exists) -> str | None:
    """Return the path that a mistyped one may have meant, written as it was: relative or absolute; None: no idea.

    Of a path with several wrong parts, the first one is set right.
    """
    parent, part = existing_parent(path)
    name = closest(part, names_in(parent, is_wanted))
    if name is None:
        return None
    displayed = parent if path.is_absolute() else Path(os.path.relpath(parent))
    return str(displayed / name)


def hint(path: Path, is_wanted: Callable[[Path], bool] = Path.exists) -> str:
    """Return `; did you mean PATH?`, or nothing."""
    match = nearest(path, is_wanted)
    return "" if match is None else f"; did you mean {match}?"
