"""Values of a launcher's expressions. Pure."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fusionrl.compat.slime.scripts.python.statements import bind
from fusionrl.compat.slime.scripts.python.values import (
    METHODS,
    NATIVE,
    OPERATORS,
    Function,
    Layer,
    Name,
    PythonError,
    Scope,
    Unknown,
    Value,
    is_module,
    not_known,
)

if TYPE_CHECKING:
    from fusionrl.compat.slime.scripts.python.reader import Reader

MAX_SIZE = 1_000_000  # of a text or a list
_WIDE = re.compile(r"\d{4}")  # of a form that makes a long text


def _name(reader: Reader, node: ast.Name, scope: Scope) -> object:
    if node.id in scope:
        return scope[node.id]
    return Name(f"builtins.{node.id}") if hasattr(builtins, node.id) else Unknown(node.id)


def _joined_str(reader: Reader, node: ast.JoinedStr, scope: Scope) -> str:
    return "".join(str(reader.value(part, scope)) for part in node.values)


def _formatted_value(reader: Reader, node: ast.FormattedValue, scope: Scope) -> object:
    value = reader.value(node.value, scope)
    if not isinstance(value, NATIVE):
        return value if isinstance(value, Unknown) else not_known(node.value)
    value = repr(value) if node.conversion == ord("r") else value
    form = str(reader.value(node.format_spec, scope)) if node.format_spec else ""
    return NotImplemented if _WIDE.search(form) else format(value, form)


def _bin_op(reader: Reader, node: ast.BinOp, scope: Scope) -> object:
    first, second = reader.value(node.left, scope), reader.value(node.right, scope)
    if {str, Unknown} == {type(first), type(second)} and isinstance(node.op, ast.Add):
        return f"{first}{second}"
    if isinstance(first, PurePosixPath) and isinstance(second, Unknown):
        return first / str(second)
    if type(node.op) not in OPERATORS or not isinstance(first, NATIVE) or not isinstance(second, NATIVE):
        return NotImplemented
    for text, factor in ((first, second), (second, first)) if isinstance(node.op, ast.Mult) else ():
        if isinstance(text, (str, list, tuple)) and isinstance(factor, int) and len(text) * factor > MAX_SIZE:
            raise PythonError(f"line {node.lineno}: `{ast.unparse(node)[:80]}` is too large")
    if isinstance(node.op, ast.Mod) and isinstance(first, str) and _WIDE.search(first):
        return NotImplemented
    if isinstance(node.op, ast.Pow) and not (first in range(-10_000, 10_000) and second in range(100)):
        return NotImplemented
    return OPERATORS[type(node.op)](first, second)


def _unary_op(reader: Reader, node: ast.UnaryOp, scope: Scope) -> object:
    if isinstance(node.op, ast.Not):
        value = reader.value(node.operand, scope)
        return not_known(node) if isinstance(value, (Unknown, Name)) else not value
    value = reader.value(node.operand, scope)
    return -value if isinstance(node.op, ast.USub) and isinstance(value, (int, float)) else not_known(node)


def _bool_op(reader: Reader, node: ast.BoolOp, scope: Scope) -> object:
    value: object = None
    for operand in node.values:
        value = reader.value(operand, scope)
        if isinstance(value, Unknown) or bool(value) != isinstance(node.op, ast.And):
            return value
    return value


def _compare(reader: Reader, node: ast.Compare, scope: Scope) -> object:
    first = reader.value(node.left, scope)
    for kind, operand in zip(node.ops, node.comparators, strict=True):
        second = reader.value(operand, scope)
        if isinstance(kind, (ast.Is, ast.IsNot)) and not isinstance(first, Unknown):
            result = (first is second) == isinstance(kind, ast.Is)
        elif isinstance(first, (Unknown, Name)) or isinstance(second, (Unknown, Name)):
            return NotImplemented
        else:
            result = bool(OPERATORS[type(kind)](first, second))
        if not result:
            return False
        first = second
    return True


def _named_expr(reader: Reader, node: ast.NamedExpr, scope: Scope) -> object:
    scope[node.target.id] = value = reader.value(node.value, scope)
    return value


def _dict(reader: Reader, node: ast.Dict, scope: Scope) -> dict[Value, Value]:
    entries: dict[Value, Value] = {}
    for key, item in zip(node.keys, node.values, strict=True):
        value = reader.value(item, scope)
        if key is not None:
            entries[reader.value(key, scope)] = value
        elif isinstance(value, dict):
            entries |= value
    return entries


def _comprehension(reader: Reader, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope) -> list[Value]:
    return [reader.value(node.elt, inner) for inner in _rounds(reader, node.generators, scope)]


def _dict_comp(reader: Reader, node: ast.DictComp, scope: Scope) -> dict[Value, Value]:
    rounds = _rounds(reader, node.generators, scope)
    return {reader.value(node.key, inner): reader.value(node.value, inner) for inner in rounds}


def _subscript(reader: Reader, node: ast.Subscript, scope: Scope) -> object:
    holder, key = reader.value(node.value, scope), reader.value(node.slice, scope)
    if isinstance(holder, Name):
        return reader.call_name(f"{holder.path}[]", [key], {})
    if isinstance(key, Unknown) or not isinstance(holder, (str, list, tuple, dict)):
        return NotImplemented
    return holder[key]


def _slice(reader: Reader, node: ast.Slice, scope: Scope) -> object:
    parts = [None if bound is None else reader.value(bound, scope) for bound in (node.lower, node.upper, node.step)]
    return not_known(node) if any(isinstance(part, Unknown) for part in parts) else slice(*parts)


def _call(reader: Reader, node: ast.Call, scope: Scope) -> object:
    if isinstance(node.func, ast.Attribute):
        holder = reader.value(node.func.value, scope)
        if isinstance(holder, tuple(METHODS)) and not is_module(holder):
            return _method(reader, holder, node, scope)
        function = reader.attribute(holder, node.func.attr)
    else:
        function = reader.value(node.func, scope)
    arguments = _elements(reader, node.args, scope)
    named: dict[str, Value] = {}
    for keyword in node.keywords:
        value = reader.value(keyword.value, scope)
        named |= {keyword.arg: value} if keyword.arg is not None else value if isinstance(value, dict) else {}
    return reader.call(function, arguments, named)


def _elements(reader: Reader, nodes: Sequence[ast.expr], scope: Scope) -> list[Value]:
    items: list[Value] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            items += reader.items(node.value, scope)
        else:
            items.append(reader.value(node, scope))
    return items


def _rounds(reader: Reader, generators: Sequence[ast.comprehension], scope: Scope) -> Iterator[Scope]:
    if not generators:
        yield scope
        return
    for item in reader.items(generators[0].iter, scope):
        inner = Layer(scope)
        bind(reader, generators[0].target, item, inner)
        if all(reader.truth(condition, inner) for condition in generators[0].ifs):
            yield from _rounds(reader, generators[1:], inner)


def _method(reader: Reader, holder: Value, node: ast.Call, scope: Scope) -> object:
    """Call a method of a text, a list, a dict, a set or a path."""
    assert isinstance(node.func, ast.Attribute)
    arguments = _elements(reader, node.args, scope)
    name = node.func.attr
    named = {keyword.arg: reader.value(keyword.value, scope) for keyword in node.keywords if keyword.arg is not None}
    if isinstance(holder, str) and name == "join" and arguments and isinstance(arguments[0], (list, tuple)):
        return holder.join(map(str, arguments[0]))
    if isinstance(holder, str) and name == "format":
        is_plain = not re.search(r"\{[^}]*[.\[\d{]", holder)
        return holder.format(*arguments, **named) if is_plain else NotImplemented
    kind = next(kind for kind in METHODS if isinstance(holder, kind))
    if isinstance(holder, PurePosixPath) and name in ("resolve", "absolute", "expanduser"):
        return holder
    is_known = kind in (list, dict) or not any(isinstance(argument, Unknown) for argument in arguments)
    if name not in METHODS[kind] or named or not is_known:
        return NotImplemented
    value = getattr(holder, name)(*arguments)
    return list(value) if name in ("items", "keys", "values") else value


EXPRESSIONS: dict[type[ast.expr], Callable[[Reader, Value, Scope], Value]] = {
    ast.Constant: lambda reader, node, scope: node.value,
    ast.Name: _name,
    ast.JoinedStr: _joined_str,
    ast.FormattedValue: _formatted_value,
    ast.BinOp: _bin_op,
    ast.UnaryOp: _unary_op,
    ast.BoolOp: _bool_op,
    ast.Compare: _compare,
    ast.IfExp: lambda reader, node, scope: reader.value(
        node.body if reader.truth(node.test, scope) else node.orelse, scope
    ),
    ast.NamedExpr: _named_expr,
    ast.List: lambda reader, node, scope: _elements(reader, node.elts, scope),
    ast.Tuple: lambda reader, node, scope: tuple(_elements(reader, node.elts, scope)),
    ast.Set: lambda reader, node, scope: set(_elements(reader, node.elts, scope)),
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.SetComp: lambda reader, node, scope: set(_comprehension(reader, node, scope)),
    ast.DictComp: _dict_comp,
    ast.Lambda: lambda reader, node, scope: Function(node, scope),
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.Attribute: lambda reader, node, scope: reader.attribute(reader.value(node.value, scope), node.attr),
    ast.Call: _call,
}
