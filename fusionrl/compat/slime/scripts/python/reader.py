"""The part of Python that launchers are written in, read without being run.

Texts, numbers, lists and dicts are Python's own; functions, classes and modules are read from their source. Nothing
else exists: no file is opened, no process started, no attribute looked up on a Python object. What cannot be
known is an `Unknown`, which text has as a variable of a shell, `${NAME}`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from fusionrl.compat.slime.scripts.python.expressions import EXPRESSIONS, MAX_SIZE
from fusionrl.compat.slime.scripts.python.statements import STATEMENTS, Returned
from fusionrl.compat.slime.scripts.python.values import (
    Class,
    Field,
    Function,
    Instance,
    Layer,
    Name,
    PythonError,
    Scope,
    Unknown,
    Value,
    is_module,
    not_known,
)

_MAX_STEPS = 400_000
_MAX_DEPTH = 60  # of calls
READ = "read:"  # before the path of a function whose source is read, unless `call_name` knows what it does


class Reader:
    """Reads statements in scopes.

    call_name  what a `Name` does when it is called, by its path, with its arguments; NotImplemented: it is not known
    module     the scope of a module, by its name and the file that imports it; None: its source is not there
    note       says what was taken for granted
    """

    def __init__(
        self,
        call_name: Callable[[str, list[Value], dict[str, Value]], Value],
        module: Callable[[str, str], Scope | None],
        note: Callable[[str], None],
    ) -> None:
        self.call_name, self.module, self.note = call_name, module, note
        self.num_steps = self.depth = 0

    def block(self, statements: Sequence[ast.stmt], scope: Scope, is_lenient: bool = False) -> None:
        """Read statements. `is_lenient`: one that raises is passed over, and named."""
        for statement in statements:
            self.num_steps += 1
            if self.num_steps > _MAX_STEPS:
                raise PythonError(f"line {statement.lineno}: it does not end within {_MAX_STEPS} steps")
            try:
                if (effect := STATEMENTS.get(type(statement))) is not None:
                    effect(self, statement, scope)
            except PythonError as error:
                is_call = isinstance(statement, ast.Expr)
                if self.num_steps > _MAX_STEPS or not (is_lenient or is_call):
                    raise
                self.note(f"line {statement.lineno} is passed over: {error}")

    def truth(self, node: ast.expr, scope: Scope) -> bool:
        """Return whether a condition holds; one that is not known does not, and is named."""
        value = self.value(node, scope)
        if isinstance(value, (Unknown, Name)):
            self.note(f"`{ast.unparse(node)}` (line {node.lineno}) is taken as false: it is not known")
            return False
        return bool(value)

    def items(self, node: ast.expr, scope: Scope) -> list[Value]:
        """Return what a loop goes over; nothing where that is not known."""
        value = self.value(node, scope)
        if isinstance(value, (str, list, tuple, dict, set, range)) and len(value) <= MAX_SIZE:
            return list(value)
        self.note(f"a loop over `{ast.unparse(node)}` (line {node.lineno}) is passed over: it is not known")
        return []

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """Return the value of an expression.

        Raises:
            PythonError: it raises, or is larger than a launcher's.
        """
        self.num_steps += 1
        try:
            value = EXPRESSIONS[type(node)](self, node, scope) if type(node) in EXPRESSIONS else NotImplemented
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, ValueError) as error:
            if isinstance(error, PythonError):
                raise
            raise PythonError(f"line {node.lineno}: `{ast.unparse(node)[:80]}`: {error!r}") from error
        if isinstance(value, (str, list, tuple, dict, set)) and len(value) > MAX_SIZE:
            raise PythonError(f"line {node.lineno}: `{ast.unparse(node)[:80]}` is too large")
        return not_known(node) if value is NotImplemented else value

    def attribute(self, holder: object, name: str) -> object:
        """Return an attribute of a value; NotImplemented where that is not known."""
        if isinstance(holder, dict) and is_module(holder):
            return holder.get(name, Name(f"{holder.get('__name__', '')}.{name}"))
        if isinstance(holder, Name):
            return Name(f"{holder.path}.{name}")
        if isinstance(holder, Class):
            return holder.members.get(name, holder.fields.get(name, Name(f"{holder.name}.{name}")))
        if isinstance(holder, Instance):
            member = holder.values.get(name, holder.of.members.get(name, Unknown(name)))
            if not isinstance(member, Function) or name in holder.values:
                return member
            method = Function(member.node, member.scope, holder)
            is_property = any(
                "property" in ast.unparse(decorator) for decorator in getattr(member.node, "decorator_list", ())
            )
            return self.call(method, [], {}) if is_property else method
        if isinstance(holder, PurePosixPath) and name in ("parent", "name", "stem", "suffix", "parents", "parts"):
            part = getattr(holder, name)
            return list(part) if name in ("parents", "parts") else part
        return NotImplemented

    def call(self, function: object, arguments: list[Value], named: Mapping[str, Value]) -> object:
        """Return what a call returns; NotImplemented where that is not known."""
        if isinstance(function, Class):
            return self.make(function, arguments, named)
        if isinstance(function, Name):
            return self.call_name(function.path, arguments, dict(named))
        if not isinstance(function, Function):
            return NotImplemented
        if isinstance(function.node, ast.FunctionDef) and (module := function.scope.get("__name__")) != "__main__":
            known = self.call_name(f"{READ}{module}.{function.node.name}", arguments, dict(named))
            if known is not NotImplemented:
                return known
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise PythonError(f"calls are nested more than {_MAX_DEPTH} deep")
        try:
            inner = self._bound(function, arguments, named)
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body, inner)
            self.block(function.node.body, inner)
        except Returned as result:
            return result.value
        finally:
            self.depth -= 1
        return None

    def _bound(self, function: Function, arguments: Sequence[Value], named: Mapping[str, Value]) -> Scope:
        """Return the scope of a call: the function's parameters with their values."""
        inner = Layer(function.scope)
        parameters = function.node.args
        names = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
        for name, default in zip(reversed(names), reversed(parameters.defaults), strict=False):
            inner[name] = self.value(default, function.scope)
        for parameter, expression in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if expression is not None:
                inner[parameter.arg] = self.value(expression, function.scope)
        positional = [function.owner, *arguments] if function.owner is not None else list(arguments)
        inner.update(zip(names, positional, strict=False))
        if parameters.vararg is not None:
            inner[parameters.vararg.arg] = tuple(positional[len(names) :])
        known = {*names, *(parameter.arg for parameter in parameters.kwonlyargs)}
        inner.update({name: value for name, value in named.items() if name in known})
        if parameters.kwarg is not None:
            inner[parameters.kwarg.arg] = {name: value for name, value in named.items() if name not in known}
        for name in known - dict.keys(inner):
            inner[name] = Unknown(name)
        return inner

    def make(self, of: Class, arguments: Sequence[Value], named: Mapping[str, Value]) -> Instance:
        """Return an object of a class; fields without a value are not known."""
        instance = Instance(of, {})
        if of.is_data:
            for name, default in of.fields.items():
                if isinstance(default, Field):
                    default = self.call(default.factory, [], {}) if default.factory is not None else default.value
                instance.values[name] = Unknown(name) if default in (Unknown(""), NotImplemented) else default
            instance.values |= {**dict(zip(of.fields, arguments, strict=False)), **named}
        start = of.members.get("__post_init__" if of.is_data else "__init__")
        if isinstance(start, Function):
            self.call(Function(start.node, start.scope, instance), [] if of.is_data else list(arguments), named)
        return instance
