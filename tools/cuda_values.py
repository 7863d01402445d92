"""The value that a condition has on a CPU, as far as the source tells: `cuda_branches.py` lists what it never takes."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

CUDA_WORDS = frozenset({"cuda", "nccl", "transformer_engine"})
# Parameters and fields whose value the source does not show in one place; on a CPU each is this.
GIVEN = {
    "has_cuda": False,
    "on_gpu": False,
    "is_cuda": False,
    "has_fused_layers": False,
    "use_cpu_initialization": True,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Names:
    """Attributes and functions with one value on a CPU, wherever they are named."""

    values: dict[str, bool] = field(default_factory=lambda: dict(GIVEN))


def value(node: ast.expr, names: Names, local: dict[str, bool]) -> bool | None:
    """Return the truth of an expression on a CPU; None: the source does not tell."""
    if isinstance(node, ast.Compare):
        return _compared(node)
    if isinstance(node, ast.BoolOp):
        parts, ends = [value(part, names, local) for part in node.values], isinstance(node.op, ast.Or)
        return ends if ends in parts else None if None in parts else not ends
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        operand = value(node.operand, names, local)
        return None if operand is None else not operand
    if isinstance(node, ast.NamedExpr):
        return value(node.value, names, local)
    if isinstance(node, ast.Call):
        return _called(node.func, names)
    if isinstance(node, ast.Attribute):
        return names.values.get(node.attr)
    if isinstance(node, ast.Name):
        return local.get(node.id, names.values.get(node.id))
    return None


def _called(function: ast.expr, names: Names) -> bool | None:
    text = ast.unparse(function)
    if text in ("torch.cuda.is_available", "torch.cuda.device_count"):
        return False
    return names.values.get(text.rsplit(".", 1)[-1]) if not text.endswith("is_available") else None


def _compared(node: ast.Compare) -> bool | None:
    """`x == "cuda"`, `x != "cpu"`, `x in ("cuda",)`, `"cuda" in xs`."""
    if len(node.ops) != 1:
        return None
    operator, (left, right) = node.ops[0], (_words(node.left), _words(node.comparators[0]))
    if isinstance(operator, ast.Eq | ast.Is | ast.In):
        equal = True
    elif isinstance(operator, ast.NotEq | ast.IsNot | ast.NotIn):
        equal = False
    else:
        return None
    for words in (left, right):
        if words and words <= CUDA_WORDS:
            return not equal
        if words == {"cpu"}:
            return equal
    return None


def _words(node: ast.expr) -> set[str]:
    """The strings of a constant or of a display of constants."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    words = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return words if len(words) == len(parts) else set()


def names_of(trees: Iterable[ast.Module]) -> Names:
    """Return the functions, properties and attributes that are computed from such conditions alone."""
    names, trees = Names(), list(trees)
    while True:
        truths: dict[str, set[bool | None]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, Function) and _returns_bool(node):
                    truths.setdefault(node.name, set()).update(_returned(node, names))
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    truths.setdefault(node.targets[0].attr, set()).add(value(node.value, names, {}))
                elif isinstance(node, ast.keyword) and node.arg is not None:  # a field of a dataclass
                    truths.setdefault(node.arg, set()).add(value(node.value, names, {}))
        new = {
            name: truth
            for name, values in truths.items()
            if len(values) == 1 and (truth := next(iter(values))) is not None
        }
        if new.items() <= names.values.items():
            return names
        names.values |= new


def _returns_bool(function: Function) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "bool"


def _returned(function: Function, names: Names) -> set[bool | None]:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return {None if node.value is None else value(node.value, names, {}) for node in returns}
