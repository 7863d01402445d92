"""Asserts over numbers that a program answered, worked out here: `abs(f(2) - 1.5) < 1e-6`.

A judge's process could do it as well (`code_run`), but costs another interpreter. Only numbers of bounded size and
operations on them are known; whatever else a test has is left to the judge.
"""

import ast
import math
from collections.abc import Sequence
from typing import Any

ASK = "__ask__"  # __ask__(n): the n-th answer
_MOST_BITS = 1024
_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd, ast.Not),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_NAMES = {"abs": abs, "round": round, "float": float, "math": math}
_CALLS = {ASK, "abs", "round", "float", "math.isclose"}


class NoNumbers(ValueError):
    """The test or an answer is something else: a judge must look at it."""


def is_numeric(node: ast.expr) -> bool:
    """Return whether `value_of` knows everything in it, and Python would need every answer whatever the others are."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, _OPERATORS) and is_numeric(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and is_numeric(left) and is_numeric(right)
        case ast.BoolOp(values=values):
            return all(map(is_numeric, values)) and not any(map(_asks, values[1:]))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            known = all(isinstance(op, _OPERATORS) for op in ops) and not any(map(_asks, comparators[1:]))
            return known and all(map(is_numeric, [left, *comparators]))
        case ast.Call(func=func, args=args, keywords=keywords):
            arguments = [*args, *(keyword.value for keyword in keywords)]
            return ast.unparse(func) in _CALLS and all(map(is_numeric, arguments))
    return False


def _asks(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == ASK for inner in ast.walk(node))


def number_of(wire: object) -> int | float:
    """The number of a wire form. Raises NoNumbers if it is something else, or too large."""
    match wire:
        case {"f": "nan" | "inf" | "-inf" as text, **others} if not others:
            return float(text)
        case int() | float():
            if isinstance(wire, float) or wire.bit_length() <= _MOST_BITS:
                return wire
    raise NoNumbers


def value_of(node: ast.expr, answers: Sequence[int | float]) -> Any:
    """The value of a test that `is_numeric`, by Python itself: it has nothing but operations on bounded numbers.

    Raises ArithmeticError, TypeError or ValueError, as Python does for these numbers.
    """
    code = compile(ast.Expression(node), "test.py", "eval", dont_inherit=True)
    return eval(code, {"__builtins__": {}, ASK: answers.__getitem__, **_NAMES})
