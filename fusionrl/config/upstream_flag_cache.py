"""Another package's command line, kept in a file: its flags are known without the seconds that importing it takes.

Building SGLang's parser imports torch and every SGLang layer: 3 s of CPU time before a run starts. The
file describes the options that are plain (a number, a text, a switch, with or without choices). What it does not
describe, and every value that it would refuse, is for the package's own parser: so a message is always the package's.

The file is JSON in the user's cache folder, for this user alone, and named by the versions and files that the parser
came from. Without it, or where it cannot be written, the package is imported as before.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fusionrl.base.cache_files import cache_path, file_fact, read_cache, write_cache

_TYPES: dict[str, Callable[[str], object] | None] = {"": None, "int": int, "float": float, "str": str}
_SWITCHES: dict[type[argparse.Action], str] = {
    argparse._StoreTrueAction: "store_true",
    argparse._StoreFalseAction: "store_false",
}
_FORM = 1  # of the file


class _Unknown(Exception):
    """The file cannot say: the package's own parser has to."""


class _ForTheOther(argparse.Action):
    """An option that is known by its name alone."""

    def __call__(self, *_: object) -> NoReturn:
        raise _Unknown


class KeptParser(argparse.ArgumentParser):
    """A parser of the options in a file, with the package's own behind it."""

    def __init__(self, options: Sequence[dict[str, Any]], real: Callable[[], argparse.ArgumentParser]) -> None:
        """`real` imports the package and gives its parser."""
        super().__init__(add_help=False, allow_abbrev=False)
        self.real = real
        for option in options:
            names, settings = option["names"], {key: option[key] for key in ("dest", "nargs") if option.get(key)}
            if not option["is_plain"]:
                self.add_argument(*names, action=_ForTheOther, **settings | {"nargs": option["nargs"]})
            elif option["switch"]:
                self.add_argument(*names, dest=option["dest"], action=option["switch"])
            else:
                self.add_argument(*names, type=_TYPES[option["type"]] or str, choices=option["choices"], **settings)

    def error(self, message: str) -> NoReturn:
        """Leave every refusal to the package."""
        raise _Unknown(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as the package's parser does."""
        try:
            return super().parse_known_args(args, namespace)
        except _Unknown:
            real = self.real()
            for action in real._actions:
                action.required = False
            return real.parse_known_args(args, namespace)


def own_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the package's own parser, which is imported if `parser` is from a file."""
    return parser.real() if isinstance(parser, KeptParser) else parser


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Every option of a parser, for the file."""
    entries = []
    for action in parser._actions:
        if not action.option_strings:
            continue
        type_name = next((name for name, kind in _TYPES.items() if kind is action.type), None)
        choices = None if action.choices is None else list(action.choices)
        is_store = type(action) is argparse._StoreAction and type_name is not None and action.const is None
        is_text = choices is None or all(isinstance(choice, str | int | float) for choice in choices)
        entries.append(
            {
                "names": list(action.option_strings),
                "dest": action.dest,
                "nargs": action.nargs,
                "switch": _SWITCHES.get(type(action), ""),
                "is_plain": type(action) in _SWITCHES or (is_store and is_text and action.nargs in (None, "+", "*")),
                "type": type_name or "",
                "choices": choices if is_text else None,
            }
        )
    return entries


def kept_parser(
    package: str, version: str, sources: Iterable[Path], real: Callable[[], argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """The parser of a package, from the file where there is one; else the package's own, and the file is written.

    Args:
        package: a name for the file.
        version: versions of all packages that may change the options.
        sources: files of the package that declare its options.
        real: imports the package and gives its parser.
    """
    try:
        facts = [file_fact(source, source.stat()) for source in sorted(sources)]
        path = cache_path(f"{package}-flags", [str(_FORM), version, *facts])
    except RuntimeError:  # a user without a home
        return real()
    options = _read(path)
    if options is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError, argparse.ArgumentError):  # of another form
            return KeptParser(options, real)
    parser = real()
    with contextlib.suppress(OSError, TypeError, ValueError):  # a missing folder, an option that JSON cannot hold
        write_cache(path, describe(parser))
    return parser


def _read(path: Path) -> list[dict[str, Any]] | None:
    content = read_cache(path)
    if not isinstance(content, list):
        return None
    options = [option for option in content if isinstance(option, dict)]
    return options if len(options) == len(content) else None
