"""Labels of --rm-type code: a test set, a dict or its JSON, becomes tests, each of the simplest kind that fits."""

import ast
import builtins
import json
import symtable
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from fusionrl.rewards.plain_data import wire_of

ASK = "__ask__"  # __ask__(n): the n-th answer
_BUILTINS = frozenset(dir(builtins))
_MODULES = dict.fromkeys(sys.stdlib_module_names, "") | {"np": "numpy", "numpy": "", "pd": "pandas", "pandas": ""}
# Applied to one answer of the program these lose nothing of the test: their argument is not expected of the program.
_WRAPPERS = frozenset({"dict", "float", "frozenset", "int", "len", "list", "max", "min", "set", "sorted", "str"}) | {
    *("sum", "tuple", "bool", "round")
}


@dataclass(frozen=True)
class InputTest:
    """A program's standard input and its expected output."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A call of a function, or of a method of `Solution`, and its expected value in the wire form."""

    setup: str
    name: str
    arguments: list[object]
    expected: object


@dataclass(frozen=True)
class ExpressionTest:
    """An assert that one expression of the program's has a value.

    kind  "==" compares with `expected` (wire form); "is" wants the very None, True or False; "true" and "false" want a
          truth value
    """

    setup: str
    expression: str
    kind: str
    expected: object = None


@dataclass(frozen=True)
class JudgedTest:
    """Any other statement: it runs in a process of its own, where the names `remote` are the program's."""

    program_setup: str
    setup: str
    statement: str
    remote: tuple[str, ...]
    modules: tuple[tuple[str, str], ...]  # (name, module) that the statement takes for granted


Test = InputTest | CallTest | ExpressionTest | JudgedTest


def read_tests(label: object) -> list[Test]:
    """The tests of a label. Raises ValueError if it is not a test set; the text gives the reason."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--rm-type code: the label is not valid JSON ({error})") from error
    tests: object = {"asserts": label} if isinstance(label, list) else label
    if not isinstance(tests, dict):
        raise ValueError(f"--rm-type code: the label is {type(label).__name__}; a dict of tests is wanted")
    setup = str(tests.get("setup") or "")
    parsed: list[Test]
    if "asserts" in tests:
        parsed = [_read_statement(statement, setup) for statement in _statements(tests["asserts"])]
    elif isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        parsed = _read_pairs(tests["inputs"], tests["outputs"], str(tests.get("fn_name") or ""), setup)
    else:
        raise ValueError(f"--rm-type code: the label has {sorted(tests)}; inputs and outputs, or asserts, are wanted")
    if not parsed:
        raise ValueError("--rm-type code: the label has no tests")
    return parsed


def _read_pairs(inputs: list[object], outputs: list[object], name: str, setup: str) -> list[Test]:
    if len(inputs) != len(outputs):
        raise ValueError(f"--rm-type code: the label has {len(inputs)} inputs and {len(outputs)} outputs")

    def as_text(value: object) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

    if not name:
        return [InputTest(as_text(i), as_text(o)) for i, o in zip(inputs, outputs, strict=True)]
    parsed: list[Test] = []
    for number, (arguments, expected) in enumerate(zip(inputs, outputs, strict=True)):
        try:
            if isinstance(arguments, str):  # LiveCodeBench (arXiv 2403.07974): an argument a line, each as JSON
                arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
                if not isinstance(expected, str):
                    raise TypeError(f"the output is {type(expected).__name__}, not JSON text")
                expected = json.loads(expected)
            if not isinstance(arguments, Iterable):
                raise TypeError(f"the input is {type(arguments).__name__}, not a list of arguments")
            parsed.append(CallTest(setup, name, list(arguments), wire_of(expected)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"--rm-type code: input or output {number} of the label is unreadable: {error}") from error
    return parsed


def _statements(asserts: object) -> list[str]:
    """The tests of `asserts`: of a list its items; of one text its assert statements, or, with others, all at once."""
    if isinstance(asserts, str):
        tree = _parse(asserts)
        if all(isinstance(statement, ast.Assert) for statement in tree.body):
            return [ast.unparse(statement) for statement in tree.body]
        return [asserts]
    if not isinstance(asserts, list) or not all(isinstance(text, str) for text in asserts):
        raise ValueError("--rm-type code: the label's asserts are neither text nor a list of texts")
    return asserts


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: NUL, a lone surrogate
        raise ValueError(f"--rm-type code: {text[:80]!r} of the label is not Python: {error}") from error


def _read_statement(statement: str, setup: str) -> Test:
    tree, setup_tree = _parse(statement), _parse(setup)
    setup_names, is_closed = _bound_by(setup, setup_tree)
    remote = _names_of_program(tree, setup_tree, setup_names)
    program_setup = _without_checks(setup_tree)
    if is_closed and (test := _as_expression(tree, remote, setup_names, program_setup)):
        return test
    visible = _BUILTINS | _bound_by(program_setup, _parse(program_setup))[0] | remote
    rewritten = _Asking(tree, remote, visible).visit(tree)
    assert isinstance(rewritten, ast.Module)  # it replaces calls alone
    ast.fix_missing_locations(rewritten)
    modules = {
        node.value.id: _MODULES[node.value.id] or node.value.id
        for part in (tree, setup_tree)
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in _MODULES and node.value.id not in remote
    }
    used = tuple((name, module) for name, module in modules.items() if name not in setup_names)
    return JudgedTest(program_setup, setup, ast.unparse(rewritten), tuple(sorted(remote)), used)


def _bound_by(setup: str, tree: ast.Module) -> tuple[frozenset[str], bool]:
    """(names that the setup defines, whether these are all: not so after `from … import *`)."""
    try:
        table = symtable.symtable(setup, "setup", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"--rm-type code: the setup {setup[:80]!r} is not Python: {error}") from error
    names = frozenset(
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    )
    star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body)
    return names, not star


def _names_of_program(tree: ast.Module, setup_tree: ast.Module, setup_names: frozenset[str]) -> frozenset[str]:
    """Names that a statement, or the setup, uses and that only the program can define."""
    names: set[str] = set()
    for part in (tree, setup_tree):
        bound = _bound_in(part)
        used_as_module = {
            id(node.value)
            for node in ast.walk(part)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id not in bound and node.id not in setup_names:
                is_module = node.id in _MODULES and id(node) in used_as_module
                if node.id not in _BUILTINS and not is_module:
                    names.add(node.id)
    if not names:  # a program may be asked for a function of a builtin's name: `assert sum(10, 15) == 6`
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in setup_names:
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                if not any(isinstance(inner, ast.Call) for argument in arguments for inner in ast.walk(argument)):
                    names.add(node.func.id)
    return frozenset(names)


def _bound_in(tree: ast.AST) -> set[str]:
    """Names that are assigned anywhere in it, arguments of functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                names.add(node.id)
            case ast.arg():
                names.add(node.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias():
                names.add((node.asname or node.name).partition(".")[0])
    return names


def _without_checks(setup: ast.Module) -> str:
    """The setup as the program's process gets it: without functions that assert something, whose text has answers."""
    supported = [
        node
        for node in setup.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or not any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    ]
    return ast.unparse(ast.Module(supported, type_ignores=[]))


def _as_expression(
    tree: ast.Module, remote: frozenset[str], setup_names: frozenset[str], setup: str
) -> ExpressionTest | None:
    """The test as one expression of the program's and its expected value, if it is that simple."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return None
    test = tree.body[0].test
    kind, expression = "true", test
    expected: object = None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        kind, expression = "false", test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        if isinstance(test.ops[0], ast.Is) and isinstance(right, ast.Constant) and right.value in (None, True, False):
            kind, expression, expected = "is", left, right.value
        elif isinstance(test.ops[0], ast.Eq):
            kind = "=="
            sides = [(left, right), (right, left)]
            candidates = [
                (expression, value)
                for expression, opposite in sides
                if (value := _literal(opposite)) is not _NO_LITERAL
            ]
            if not candidates:
                return None
            expression, expected = candidates[0]
        else:
            return None
    if not _is_asked(expression, remote, setup_names):
        return None
    return ExpressionTest(setup, ast.unparse(expression), kind, expected)


_NO_LITERAL = object()


def _literal(node: ast.expr) -> object:
    """The wire form of a literal, also of set((1, 2)) and float("inf"); else _NO_LITERAL."""
    kinds = {"set": set, "frozenset": frozenset, "float": float, "tuple": tuple, "list": list, "dict": dict}
    try:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[] | [_], keywords=[]) if name in kinds:
                return wire_of(kinds[name](*(ast.literal_eval(argument) for argument in node.args)))
        return wire_of(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_LITERAL


def _is_asked(node: ast.expr, remote: frozenset[str], setup_names: frozenset[str]) -> bool:
    """Return whether the program may evaluate it: a call of its names with inputs alone as arguments."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in remote | setup_names:
        if node.func.id not in _WRAPPERS or node.keywords or not node.args:
            return False
        first, *rest = node.args
        constant = node.func.id == "round" and all(isinstance(argument, ast.Constant) for argument in rest)
        return (not rest or constant) and _is_asked(first, remote, setup_names)
    return isinstance(node, ast.Call | ast.Attribute | ast.Subscript) and _root(node) in remote


def _root(node: ast.expr) -> str | None:
    """The name from which a chain of calls, attributes and items starts."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


class _Asking(ast.NodeTransformer):
    """Replaces each expression that the program can evaluate by a question to its process."""

    def __init__(self, tree: ast.Module, remote: frozenset[str], visible: frozenset[str]) -> None:
        self._remote = remote
        self._visible = visible - _bound_in(tree)

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Call) and _root(node) in self._remote and self._is_visible(node):
            question = ast.Name(ASK, ast.Load())
            return ast.Call(question, [ast.Constant(ast.unparse(node))], [])
        return self.generic_visit(node)

    def _is_visible(self, node: ast.Call) -> bool:
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return names <= self._visible | _bound_in(node)
