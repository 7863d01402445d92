"""List every branch of fusionrl/ that only a device `cuda` reaches, and the test or the stage of the proof that does.

    python tools/cuda_branches.py              # every branch, with what reaches it
    python tools/cuda_branches.py --missing    # branches without a row in the table, as rows to complete

A branch is an arm of an `if`, of a conditional expression or of `and`/`or`, the rest of a block after an early exit, or
a function that is named in such branches alone. The scan gives each condition its value on a CPU (`device == "cuda"`
and `tensor.is_cuda` are false there, as is what is computed from them); the arms that this value never takes are
listed. The table is `tools/cuda_branches.txt`: a branch, and what reaches it. `tools/cuda_reached.py` finds out which
tests do. A test fails for a branch without a row, and for a row without a branch.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.cuda_values import Names, names_of, value

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".txt")
# Not ours to show: the CPU layer, which a GPU never installs.
LEFT_OUT = ("cpu/megatron_patches.py",)
QUESTIONS = (".is_available", ".device_count")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Span = tuple[int, int, int, int]
"""First line and column, last line and column."""


@dataclass(frozen=True)
class Branch:
    """A branch that a CPU never takes.

    file      below fusionrl/
    function  qualified name; "" for the module
    arm       "if", "else", "rest", "and", "or" or "def", with the condition
    span      of its code
    """

    file: str
    function: str
    arm: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.function} | {self.arm}"


def _span(nodes: Iterable[ast.AST]) -> Span:
    parts = [node for node in nodes if hasattr(node, "lineno")]
    first, last = parts[0], parts[-1]
    assert isinstance(first, ast.stmt | ast.expr) and isinstance(last, ast.stmt | ast.expr)
    return first.lineno, first.col_offset, last.end_lineno or last.lineno, last.end_col_offset or 0


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _leaves(block: list[ast.stmt]) -> bool:
    """Return whether the block always leaves the one around it."""
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


class _File:
    """The branches of one file."""

    def __init__(self, file: str, tree: ast.Module, names: Names) -> None:
        self.branches: list[Branch] = []
        self.only: list[tuple[str, ast.AST]] = []
        """Code that only CUDA reaches: (function, node)."""
        self._file, self._names = file, names
        self._block(tree.body, "", {})

    def _add(self, function: str, arm: str, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        if not all(isinstance(node, ast.Pass) for node in nodes):
            self.branches.append(Branch(self._file, function, arm, _span(nodes)))
            self.only += [(function, node) for node in nodes]

    def _block(self, block: list[ast.stmt], function: str, local: dict[str, bool]) -> None:
        for index, statement in enumerate(block):
            if isinstance(statement, Function | ast.ClassDef):
                inner = f"{function}.{statement.name}".lstrip(".")
                known = dict(local) if isinstance(statement, ast.ClassDef) else {**local, **self._local(statement)}
                for decorator in statement.decorator_list:
                    self._expressions(decorator, function, local)
                self._block(statement.body, inner, known)
                continue
            self._expressions(statement, function, local)
            if isinstance(statement, ast.If | ast.While):
                truth, text = value(statement.test, self._names, local), _short(statement.test)
                if truth is False:
                    self._add(function, f"if {text}", statement.body)
                elif truth is True and statement.orelse:
                    self._add(function, f"else of {text}", statement.orelse)
                if truth is True and _leaves(statement.body) and not statement.orelse and block[index + 1 :]:
                    self._add(function, f"rest after {text}", block[index + 1 :])
            for inner_block in _blocks(statement):
                self._block(inner_block, function, local)

    def _local(self, function: Function) -> dict[str, bool]:
        """Names that are given a known value once."""
        truths: dict[str, list[bool | None]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                truths.setdefault(node.targets[0].id, []).append(value(node.value, self._names, {}))
        return {name: values[0] for name, values in truths.items() if len(values) == 1 and values[0] is not None}

    def _expressions(self, statement: ast.AST, function: str, local: dict[str, bool]) -> None:
        """Conditional expressions, `and`, `or` and filters; of a compound statement only its head."""
        for node in _own(statement):
            if isinstance(node, ast.IfExp):
                truth = value(node.test, self._names, local)
                if truth is not None:
                    arm = "if" if truth is False else "else of"
                    self._add(function, f"{arm} {_short(node.test)}", [node.orelse if truth else node.body])
            elif isinstance(node, ast.BoolOp):
                ends = isinstance(node.op, ast.Or)  # the value that ends the evaluation
                for index, part in enumerate(node.values[:-1]):
                    if value(part, self._names, local) is ends:
                        arm = "or after" if ends else "and after"
                        self._add(function, f"{arm} {_short(part)}", node.values[index + 1 :])
                        break
                if value(node, self._names, local) is None:  # the arm has other ways in, too
                    self._by(node, function, local, ends)
            elif isinstance(node, ast.comprehension):
                for test in node.ifs:
                    if value(test, self._names, local) is False:
                        self._add(function, f"filter {_short(test)}", [node.iter])

    def _by(self, node: ast.BoolOp, function: str, local: dict[str, bool], ends: bool) -> None:
        """Parts that a CPU evaluates, too, and whose value only CUDA has as `ends`."""
        for part in node.values:
            if value(part, self._names, local) is (not ends):
                arm = f"{'or' if ends else 'and'} by {_short(part)} of {_short(node)}"
                self.branches.append(Branch(self._file, function, arm, _span([part])))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements in it."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _own(child)


# ---------------------------------------------------------------------------------- functions that only these call
def _is_torchs(node: ast.AST) -> bool:
    """Return whether the text of an expression begins with `torch.`."""
    is_part = False
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node, is_part = node.func if isinstance(node, ast.Call) else node.value, isinstance(node, ast.Attribute)
    return is_part and isinstance(node, ast.Name) and node.id == "torch"


class _Named:
    """What each file names and defines, from one walk of it."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._uses: dict[str, list[tuple[int, str]]] = {}
        self._definitions: dict[str, list[Function | ast.ClassDef]] = {}
        for file, tree in trees.items():
            uses, definitions = self._uses.setdefault(file, []), self._definitions.setdefault(file, [])
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    uses.append((id(node), node.id))
                elif isinstance(node, ast.Attribute) and not _is_torchs(node):
                    uses.append((id(node), node.attr))
                elif isinstance(node, Function | ast.ClassDef):
                    definitions.append(node)

    def only_in(self, only: dict[str, list[ast.AST]]) -> dict[str, list[ast.AST]]:
        """Functions and classes of a module that are named, outside themselves and imports, in such code alone."""
        outside: set[str] = set()
        within: set[str] = set()
        for file, uses in self._uses.items():
            inside = {id(node) for root in only.get(file, ()) for node in ast.walk(root)}
            for number, name in uses:
                (within if number in inside else outside).add(name)
        names = within - outside
        callers: dict[str, list[ast.AST]] = {}
        for file, definitions in self._definitions.items():
            for node in definitions:
                if node.name in names:
                    callers.setdefault(file, []).append(node)
        return callers


def scan(folder: Path = ROOT / "fusionrl") -> list[Branch]:
    """Return the branches of every file below `folder`, in order."""
    trees = {
        path.relative_to(folder).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }
    trees = {file: tree for file, tree in trees.items() if file not in LEFT_OUT}
    names = names_of(trees.values())
    files = {file: _File(file, tree, names) for file, tree in trees.items()}
    only = {file: [node for _, node in file_scan.only] for file, file_scan in files.items()}
    branches = [branch for file_scan in files.values() for branch in file_scan.branches]
    named = _Named(trees)
    while True:
        more = named.only_in(only)
        new = [(file, node) for file, nodes in more.items() for node in nodes if node not in only[file]]
        if not new:
            break
        for file, node in new:
            assert isinstance(node, Function | ast.ClassDef)
            only[file].append(node)
            branches.append(Branch(file, _qualified(trees[file], node), "def", _span(node.body)))
    for file, nodes in only.items():
        branches += _inner(file, trees[file], nodes, {branch.span for branch in branches if branch.file == file})
        branches += _calls(file, trees[file], nodes)
    return sorted(_numbered(branches), key=lambda branch: (branch.file, branch.span))


def _inner(file: str, tree: ast.Module, only: list[ast.AST], listed: set[Span]) -> Iterator[Branch]:
    """Yield the arms of each `if` inside such code, whatever it asks."""
    seen: set[int] = set()
    for node in (node for root in only for node in ast.walk(root)):
        if not isinstance(node, ast.If) or id(node) in seen:
            continue
        seen.add(id(node))
        is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
        for arm, block in (("if", node.body), ("else of", [] if is_elif else node.orelse)):
            if block and _span(block) not in listed:
                yield Branch(file, _qualified(tree, node), f"{arm} {_short(node.test)}", _span(block))


def _calls(file: str, tree: ast.Module, only: list[ast.AST]) -> Iterator[Branch]:
    """Yield the calls of torch.cuda outside such code; questions, which a CPU asks, too, are none."""
    inside = {id(node) for root in only for node in ast.walk(root)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in inside:
            text = ast.unparse(node.func)
            if text.startswith("torch.cuda.") and not text.endswith(QUESTIONS):
                yield Branch(file, _qualified(tree, node), f"call of {text}", _span([node]))


def _numbered(branches: list[Branch]) -> Iterator[Branch]:
    """Tell equal conditions of one function apart."""
    seen: dict[str, int] = {}
    for branch in sorted(branches, key=lambda branch: (branch.file, branch.span)):
        count = seen[str(branch)] = seen.get(str(branch), 0) + 1
        again = f" ({count})" if count > 1 else ""
        yield Branch(branch.file, branch.function, branch.arm + again, branch.span)


def _qualified(tree: ast.Module, target: ast.AST) -> str:
    """The name of the function around a node, or of the function or class that it is."""

    def search(node: ast.AST, name: str) -> str | None:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}".lstrip(".") if isinstance(child, Function | ast.ClassDef) else name
            qualified = inner if child is target else search(child, inner)
            if qualified is not None:
                return qualified
        return None

    return search(tree, "") or ""


# ---------------------------------------------------------------------------------- the table
def read_table(path: Path = TABLE) -> dict[str, tuple[str, ...]]:
    """Return branch → tests (`tests/…::name`) and stages (`stage NAME`) that reach it."""
    rows: dict[str, tuple[str, ...]] = {}
    branch = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("    "):
            assert branch, f"{path.name}: no branch before {line!r}"
            rows[branch] += (line.strip(),)
        else:
            branch = line
            assert branch not in rows, f"{path.name}: {branch!r} twice"
            rows[branch] = ()
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="only branches without a row")
    options = parser.parse_args(argv)
    rows, branches = read_table(), scan()
    missing = [branch for branch in branches if not rows.get(str(branch))]
    for branch in missing if options.missing else branches:
        print(branch)
        for place in rows.get(str(branch), ()):
            print(f"    {place}")
    print(f"{len(branches)} branches, {len(missing)} without a row", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
