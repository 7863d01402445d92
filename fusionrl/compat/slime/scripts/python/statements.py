"""Effects of a launcher's statements on its variables. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusionrl.compat.slime.scripts.python.values import (
    Class,
    Field,
    Function,
    Instance,
    Layer,
    Name,
    PythonError,
    Scope,
    Value,
    not_known,
)

if TYPE_CHECKING:
    from fusionrl.compat.slime.scripts.python.reader import Reader


class Returned(Exception):
    """`return`, on its way to the call."""

    def __init__(self, value: object) -> None:
        self.value = value


class Broken(Exception):
    """`break`, on its way to the loop."""


class Continued(Exception):
    """`continue`, on its way to the loop."""


def _assign(reader: Reader, node: ast.Assign, scope: Scope) -> None:
    value = reader.value(node.value, scope)
    for target in node.targets:
        bind(reader, target, value, scope)


def _ann_assign(reader: Reader, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        bind(reader, node.target, reader.value(node.value, scope), scope)


def _aug_assign(reader: Reader, node: ast.AugAssign, scope: Scope) -> None:
    before = ast.parse(ast.unparse(node.target), mode="eval").body
    changed = ast.fix_missing_locations(ast.copy_location(ast.BinOp(before, node.op, node.value), node))
    bind(reader, node.target, reader.value(changed, scope), scope)


def _if(reader: Reader, node: ast.If, scope: Scope) -> None:
    reader.block(node.body if reader.truth(node.test, scope) else node.orelse, scope)


def _for(reader: Reader, node: ast.For, scope: Scope) -> None:
    for item in reader.items(node.iter, scope):
        bind(reader, node.target, item, scope)
        try:
            reader.block(node.body, scope)
        except Continued:
            continue
        except Broken:
            return
    reader.block(node.orelse, scope)


def _while(reader: Reader, node: ast.While, scope: Scope) -> None:
    while reader.truth(node.test, scope):
        try:
            reader.block(node.body, scope)
        except Continued:
            continue
        except Broken:
            return


def _function(reader: Reader, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
    scope[node.name] = Function(node, scope)


def _leave(reader: Reader, node: ast.Break | ast.Continue, scope: Scope) -> None:
    raise Broken if isinstance(node, ast.Break) else Continued


def _class_def(reader: Reader, node: ast.ClassDef, scope: Scope) -> None:
    defined = Class(node.name, is_data=any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list))
    for base in node.bases:
        parent = reader.value(base, scope)
        if isinstance(parent, Class):
            defined.fields |= parent.fields
            defined.members |= parent.members
            defined.is_data |= parent.is_data
    inner = Layer(scope)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = Field() if statement.value is None else reader.value(statement.value, inner)
            defined.fields[statement.target.id] = inner[statement.target.id] = default
        else:
            reader.block([statement], inner)
    defined.members |= dict(inner)
    for member in defined.members.values():
        if isinstance(member, Function) and member.scope is inner:
            member.scope = scope
    scope[node.name] = defined


def _return(reader: Reader, node: ast.Return, scope: Scope) -> None:
    raise Returned(None if node.value is None else reader.value(node.value, scope))


def _raise(reader: Reader, node: ast.Raise, scope: Scope) -> None:
    raise PythonError(f"line {node.lineno} raises {ast.unparse(node.exc) if node.exc else 'again'}"[:200])


def _try(reader: Reader, node: ast.Try, scope: Scope) -> None:
    try:
        reader.block(node.body, scope)
    except PythonError:
        for handler in node.handlers[:1]:
            reader.block(handler.body, scope)
    else:
        reader.block(node.orelse, scope)
    reader.block(node.finalbody, scope)


def _with(reader: Reader, node: ast.With, scope: Scope) -> None:
    for item in node.items:
        value = reader.value(item.context_expr, scope)
        if item.optional_vars is not None:
            is_file = isinstance(value, Instance)
            bind(reader, item.optional_vars, value if is_file else not_known(item.context_expr), scope)
    reader.block(node.body, scope)


def _match(reader: Reader, node: ast.Match, scope: Scope) -> None:
    subject = reader.value(node.subject, scope)
    for case in node.cases:
        if _fits(reader, case.pattern, subject, scope) and (case.guard is None or reader.truth(case.guard, scope)):
            reader.block(case.body, scope)
            return


def _import(reader: Reader, node: ast.Import, scope: Scope) -> None:
    for alias in node.names:
        module = reader.module(alias.name, "") if alias.asname else None
        first = alias.name.partition(".")[0]
        scope[alias.asname or first] = Name(alias.name if alias.asname else first) if module is None else module


def _import_from(reader: Reader, node: ast.ImportFrom, scope: Scope) -> None:
    path = "." * node.level + (node.module or "")
    for alias in node.names:
        inside = reader.module(path, str(scope.get("__file__", "")))
        value = inside.get(alias.name) if inside is not None else None
        if value is None:
            value = reader.module(f"{path}.{alias.name}", str(scope.get("__file__", "")))
        scope[alias.asname or alias.name] = Name(f"{path}.{alias.name}") if value is None else value


def bind(reader: Reader, target: ast.expr, value: object, scope: Scope) -> None:
    """Assign `value` to a name, an attribute, an item, or several at once."""
    if isinstance(target, ast.Name):
        scope[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = list(value) if isinstance(value, (list, tuple)) else None
        for place, element in enumerate(target.elts):
            known = values is not None and place < len(values)
            bind(reader, element, values[place] if values is not None and known else not_known(element), scope)
    elif isinstance(target, ast.Attribute):
        holder = reader.value(target.value, scope)
        if isinstance(holder, Instance):
            holder.values[target.attr] = value
    elif isinstance(target, ast.Subscript):
        holder, key = reader.value(target.value, scope), reader.value(target.slice, scope)
        is_item = isinstance(holder, list) and isinstance(key, int) and -len(holder) <= key < len(holder)
        if is_item or (isinstance(holder, dict) and isinstance(key, (str, int, tuple))):
            holder[key] = value
        elif isinstance(holder, Name) and holder.path == "os.environ":
            reader.note(f"the launcher sets {key}: export it before the command if your functions need it")


def _fits(reader: Reader, pattern: ast.pattern, subject: object, scope: Scope) -> bool:
    if isinstance(pattern, ast.MatchValue):
        return bool(reader.value(pattern.value, scope) == subject)
    if isinstance(pattern, ast.MatchSingleton):
        return pattern.value is subject
    if isinstance(pattern, ast.MatchOr):
        return any(_fits(reader, option, subject, scope) for option in pattern.patterns)
    if isinstance(pattern, ast.MatchSequence):
        if not isinstance(subject, (list, tuple)) or len(subject) != len(pattern.patterns):
            return False
        return all(_fits(reader, item, part, scope) for item, part in zip(pattern.patterns, subject, strict=True))
    if isinstance(pattern, ast.MatchAs):
        if pattern.pattern is not None and not _fits(reader, pattern.pattern, subject, scope):
            return False
        if pattern.name is not None:
            scope[pattern.name] = subject
        return True
    return False


STATEMENTS: dict[type[ast.stmt], Callable[[Reader, Value, Scope], None]] = {
    ast.Expr: lambda reader, node, scope: reader.value(node.value, scope),
    ast.Assign: _assign,
    ast.AnnAssign: _ann_assign,
    ast.AugAssign: _aug_assign,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class_def,
    ast.Return: _return,
    ast.Break: _leave,
    ast.Continue: _leave,
    ast.Raise: _raise,
    ast.Try: _try,
    ast.With: _with,
    ast.Match: _match,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
}
