"""Another package's command line, kept in a file: SGLang's parser imports torch and all of SGLang, 3 s of CPU time.

The file describes the options that are plain (a number, a text, a switch, with or without choices). What it does not
describe, and every value that it would refuse, is for the package's own parser, and so every message is the package's.
It is JSON in the user's cache folder, named by the versions and files that the parser came from.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from fusionrl.base.cache_files import cache_path, file_fact, read_cache, write_cache

_SWITCHES: dict[type, str] = {argparse._StoreTrueAction: "store_true", argparse._StoreFalseAction: "store_false"}
_TYPES = {None: None, int: "int", float: "float", str: "str"}
_FORM = 2  # of the file: names of an option, and its arguments of `add_argument`


class _Unknown(Exception):
    """The file cannot say: the package's own parser has to."""


class _ForTheOther(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        raise _Unknown


class KeptParser(argparse.ArgumentParser):
    """A parser of the options in a file, with the package's own behind it."""

    def __init__(self, options: Iterable[Any], real: Callable[[], argparse.ArgumentParser]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.real = real
        self.register("action", "other", _ForTheOther)
        for kind in (int, float, str):
            self.register("type", kind.__name__, kind)
        for names, settings in options:
            self.add_argument(*names, **settings)

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


def describe(parser: argparse.ArgumentParser) -> list[tuple[list[str], dict[str, Any]]]:
    """Every option of a parser, for the file: its names, and its arguments of `add_argument`."""
    entries: list[tuple[list[str], dict[str, Any]]] = []
    for action in parser._actions:
        choices = None if action.choices is None else list(action.choices)
        is_store = type(action) is argparse._StoreAction and action.type in _TYPES and action.const is None
        is_text = choices is None or all(isinstance(choice, str | int | float) for choice in choices)
        settings: dict[str, Any] = {"dest": action.dest, "nargs": action.nargs, "action": "other"}
        if type(action) in _SWITCHES:
            settings = {"dest": action.dest, "action": _SWITCHES[type(action)]}
        elif is_store and is_text and action.nargs in (None, "+", "*"):
            kind = _TYPES[action.type]  # type: ignore[index]
            settings = {"dest": action.dest, "nargs": action.nargs, "type": kind, "choices": choices}
        if action.option_strings:
            entries.append((list(action.option_strings), settings))
    return entries


def kept_parser(
    package: str, version: str, sources: Iterable[Path], real: Callable[[], argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """The parser of a package, from the file where there is one; else the package's own, and the file is written.

    version  versions of all packages that may change the options
    sources  files of the package that declare its options
    real     imports the package and gives its parser
    """
    try:
        facts = [file_fact(source, source.stat()) for source in sorted(sources)]
        path = cache_path(f"{package}-flags", [str(_FORM), version, *facts])
    except RuntimeError:  # a user without a home
        return real()
    if isinstance(options := read_cache(path), list):
        with contextlib.suppress(TypeError, ValueError, argparse.ArgumentError):  # of another form
            return KeptParser(options, real)
    parser = real()
    with contextlib.suppress(OSError, TypeError, ValueError):  # a missing folder, an option that JSON cannot hold
        write_cache(path, describe(parser))
    return parser
