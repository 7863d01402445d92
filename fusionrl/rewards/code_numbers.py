"""Asserts over numbers that a program answered, worked out here: `abs(f(2) - 1.5) < 1e-6`.

A judge's process could do it as well (`code_run`), but costs another interpreter. Only numbers of bounded size and
operations on them are known; whatever else a test has is left to the judge.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

ASK = "__ask__"  # __ask__(n): the n-th answer
_MOST_BITS = 1024
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., Any]] = {"abs": abs, "round": round, "float": float, "math.isclose": math.isclose}


class NoNumbers(ValueError):
    """The test or an answer is something else: a judge must look at it."""


def is_numeric(node: ast.expr) -> bool:
    """Return whether `value_of` knows everything in it, and Python would need every answer whatever the others are."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.UnaryOp(op=unary, operand=operand):
            return type(unary) in _UNARY and is_numeric(operand)
        case ast.BinOp(left=left, op=binary, right=right):
            return type(binary) in _BINARY and is_numeric(left) and is_numeric(right)
        case ast.BoolOp(values=values):
            return all(map(is_numeric, values)) and not any(map(_asks, values[1:]))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            known = all(type(op) in _COMPARE for op in ops) and not any(map(_asks, comparators[1:]))
            return known and all(map(is_numeric, [left, *comparators]))
        case ast.Call(func=func, args=args, keywords=keywords):
            arguments = [*args, *(keyword.value for keyword in keywords)]
            return ast.unparse(func) in {ASK, *_CALLS} and all(map(is_numeric, arguments))
    return False


def _asks(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == ASK for inner in ast.walk(node))


def number_of(wire: object) -> int | float:
    """The number of a wire form.

    Raises:
        NoNumbers: it is something else, or too large.
    """
    match wire:
        case {"f": "nan" | "inf" | "-inf" as text, **others} if not others:
            return float(text)
        case int() | float():
            if isinstance(wire, float) or wire.bit_length() <= _MOST_BITS:
                return wire
    raise NoNumbers


def value_of(node: ast.expr, answers: Sequence[int | float]) -> Any:
    """The value of a test that `is_numeric`, as Python says it.

    Raises:
        ArithmeticError, TypeError, ValueError: as Python does for these numbers.
    """

    def inner(node: ast.expr) -> Any:
        return value_of(node, answers)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=unary, operand=operand):
            return _UNARY[type(unary)](inner(operand))
        case ast.BinOp(left=left, op=binary, right=right):
            return _BINARY[type(binary)](inner(left), inner(right))
        case ast.BoolOp(op=boolean, values=values):
            is_and = isinstance(boolean, ast.And)
            value = inner(values[0])
            for side in values[1:]:
                if bool(value) is not is_and:
                    break
                value = inner(side)
            return value
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [inner(side) for side in (left, *comparators)]
            return all(_COMPARE[type(op)](*pair) for op, pair in zip(ops, itertools.pairwise(sides), strict=True))
        case ast.Call(func=func, args=args, keywords=keywords):
            arguments = [inner(side) for side in args]
            if ast.unparse(func) == ASK:
                return answers[arguments[0]]
            return _CALLS[ast.unparse(func)](*arguments, **{str(word.arg): inner(word.value) for word in keywords})
    raise AssertionError("not numeric")
