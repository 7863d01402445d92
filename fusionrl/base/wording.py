"""Parts of messages: counts, sizes that divide, near names and paths, cures for missing packages, cells of tables."""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
BASE = "base"  # what requests call the model without an adapter
SHOWN = 6  # of many the nearest
LOG_END = "the end of it:\n"  # in the message of a death, before the last lines of a log


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes", "0 nodes"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def headline(message: str) -> str:
    """Return a message without the end of the log that it quotes."""
    return message.partition(f"; {LOG_END}")[0]


def divisors(count: int) -> list[int]:
    """Every divisor of `count` (at least 1), ascending."""
    low = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return sorted({*low, *(count // size for size in low)})


def dividing(count: int, target: int, *, at_least: int = 1, at_most: int | None = None) -> str:
    """The sizes near `target` that divide `count`, in words: "sizes that divide 12: 1, 2, 3, 4, 6 and 12".

    at_least, at_most  bounds of the sizes
    """
    fitting = [size for size in divisors(count) if at_least <= size <= (at_most or count)]
    nearest = sorted(sorted(fitting, key=lambda size: abs(size - target))[:SHOWN])
    *first, last = [str(size) for size in nearest] or ["none"]
    return f"sizes that divide {count}: " + (f"{', '.join(first)} and {last}" if first else last)


def attempt(errors: list[str], check: Callable[[], T]) -> T | None:
    """Return what `check` returns, or None with the message of its `ValueError` in `errors`."""
    try:
        return check()
    except ValueError as error:
        errors.append(str(error))
        return None


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


SETS = {
    "examples": ("bm25s", "blake3", "datasets", "langdetect", "math-verify", "pyarrow", "xxhash", "zstandard"),
    "trackers": ("tensorboard", "wandb"),
}


def install_hint(package: str) -> str:
    """Return the cure of a missing package, by its name on PyPI (`math-verify`)."""
    for name, packages in SETS.items():
        if package in packages:
            return f"bash scripts/setup-env.sh {name} installs the version that fits"
    return f"it may change pinned packages: install {package} into an environment of its own"


def table_rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (section, cells) of each row of the page's tables whose first cell begins with code."""
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield section, [cell.strip().replace("\\|", "|").replace("&lt;", "<") for cell in cells]


def codes(cell: str) -> list[str]:
    """Return the texts in a cell that are code."""
    return re.findall(r"`([^`]+)`", cell)
