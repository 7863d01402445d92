"""Values of a launcher's names: Python's texts, numbers, lists and dicts, and the classes below. Pure."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeAlias

NATIVE = (str, int, float, bool, type(None), list, tuple, dict, set, range, PurePosixPath)
Value: TypeAlias = Any  # a Python object, or one of the classes below
Scope: TypeAlias = dict[str, Value]


class PythonError(ValueError):
    """Source that is not Python, or that raises where it is read."""


@dataclass(frozen=True)
class Unknown:
    """A value that only the machine of the run knows; text has it as a shell's variable `name`."""

    name: str

    def __str__(self) -> str:
        return "${" + self.name + "}"


@dataclass(frozen=True)
class Name:
    """A module that is not read, or something of one: `os.environ`, `typer.Typer`."""

    path: str


@dataclass
class Function:
    """A function of the source, in the scope that it sees; `owner` is the object of a method."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: object = None


@dataclass(frozen=True)
class Field:
    """What `field(…)` says of a field of a dataclass; neither a factory nor a value: it is set later."""

    factory: object = None
    value: object = Unknown("")


@dataclass
class Class:
    """A class of the source; `fields` are those of a dataclass, with their defaults."""

    name: str
    fields: dict[str, Value] = field(default_factory=dict)
    members: Scope = field(default_factory=dict)
    is_data: bool = False


@dataclass
class Instance:
    """An object of such a class."""

    of: Class
    values: Scope


class Layer(dict[str, Value]):
    """The names of a call or a loop, and behind them those of the scope around it."""

    def __init__(self, around: Scope) -> None:
        super().__init__()
        self.around = around

    def __missing__(self, name: str) -> Value:
        return self.around[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.around

    def get(self, name: str, default: object = None) -> Value:
        """Return a value of this scope or of one around it."""
        return self[name] if name in self else default  # noqa: SIM401 (it would call itself)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What may be called on a text, a list, a dict, a set and a path: nothing that leads out of them.
METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "split rsplit strip lstrip rstrip replace lower upper startswith endswith splitlines partition rpartition"
        " removeprefix removesuffix title capitalize isdigit count find"
    ),
    list: _words("append extend insert index count copy pop remove reverse sort"),
    tuple: _words("index count"),
    dict: _words("get items keys values update copy setdefault pop"),
    set: _words("add update union discard"),
    PurePosixPath: _words("with_suffix with_name joinpath as_posix relative_to is_absolute"),
}
OPERATORS: dict[type[ast.AST], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, many: item in many,
    ast.NotIn: lambda item, many: item not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def is_module(value: object) -> bool:
    """Return whether a value is the scope of a module that is read."""
    return isinstance(value, dict) and "__file__" in value


def not_known(node: ast.AST) -> Unknown:
    """Return the placeholder for the value of an expression."""
    return Unknown(re.sub(r"\W+", "_", ast.unparse(node)).strip("_")[:60] or "VALUE")
