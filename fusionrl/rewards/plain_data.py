"""Comparison of what a program answered with what is expected, by values alone.

An answer comes from a process that ran the program, so it may be anything. It is read as JSON (see `harness/wire.py`),
and compared as a canonical text: nothing of the program is called, and no set or dict is built of its numbers, whose
hashes it could choose.
"""

import itertools
import json
import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from fusionrl.rewards.harness.wire import MAX_DEPTH, encode

_MOST_DIGITS = 1000  # decimal exponent or bits / 8 of a fraction: more would be a number as large as memory
_nans = itertools.count()


class Unreadable(ValueError):
    """The received data are not an answer; the text gives the reason."""


class NoPlainData(Unreadable):
    """The program answered with an object, which only its own code could compare."""


def read_answer(data: bytes) -> object:
    """Return the wire form in the first line of `data`. Raises Unreadable if there is none."""
    line, newline, _ = data.partition(b"\n")
    if not newline:
        raise Unreadable("the answer is not complete")
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, 5,000 digits; 100,000 brackets
        raise Unreadable(f"the answer is not JSON ({type(error).__name__})") from error


def _refuse_constant(text: str) -> None:
    raise ValueError(text)


def wire_of(value: object) -> object:
    """Return the wire form of an expected value. Raises ValueError if it is not plain data, or nested too deeply."""

    def refuse(value: object) -> None:
        raise ValueError(f"{type(value).__name__} is not plain data")

    return encode(value, refuse)


def canonical(wire: object, as_json: bool) -> str:
    """Return a text that is the same for equal values.

    as_json  equal is what JSON makes equal: a tuple and a list, the keys 1 and "1"; but not true and 1. Otherwise equal
             is what Python's `==` says: a tuple is not a list, True is 1. In both, 1 is 1.0 and nan equals nothing.

    Raises Unreadable if it is no wire form of a plain value.
    """
    try:
        return _canonical(wire, as_json, 0)
    except (TypeError, ValueError, InvalidOperation, ArithmeticError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable(f"no value: {error}") from error


def _canonical(wire: object, as_json: bool, depth: int) -> str:
    if depth > MAX_DEPTH:
        raise Unreadable("the answer is nested too deeply")

    def inner(items: object) -> list[str]:
        if not isinstance(items, list):
            raise Unreadable("a list is wanted")
        return [_canonical(item, as_json, depth + 1) for item in items]

    if wire is None:
        return "none"
    if isinstance(wire, bool):
        return str(wire) if as_json else _number(int(wire))
    if isinstance(wire, int | float):
        return _number(wire)
    if isinstance(wire, str):
        return json.dumps(wire)
    if isinstance(wire, list):
        return f"[{','.join(inner(wire))}]"
    if not isinstance(wire, dict) or len(wire) != 1:
        raise Unreadable("an object of one key is wanted")
    ((tag, payload),) = wire.items()
    match tag:
        case "i":
            return _number(int(payload, 16))
        case "f":
            return _number(float(payload))
        case "F":
            numerator, denominator = (int(part, 16) for part in payload)
            if max(numerator.bit_length(), denominator.bit_length()) > 8 * _MOST_DIGITS:
                raise Unreadable("the fraction is too large")
            return _number(Fraction(numerator, denominator))
        case "D":
            return _decimal(Decimal(payload))
        case "c":
            real, imaginary = inner(payload)
            return real if imaginary == _number(0) else f"({real}+{imaginary}j)"
        case "b":
            return f"b{bytes.fromhex(payload).hex()}"
        case "t":
            return f"[{','.join(inner(payload))}]" if as_json else f"({','.join(inner(payload))})"
        case "s" | "z":
            return f"{{{','.join(sorted(set(inner(payload))))}}}"
        case "d":
            pairs = dict(_pair(pair, as_json, depth) for pair in payload)
            return f"d{{{','.join(f'{key}:{pairs[key]}' for key in sorted(pairs))}}}"
        case "o":
            raise NoPlainData(f"an object of type {str(payload[0])[:100]}")
    raise Unreadable(f"unknown tag {tag[:10]!r}")


def _pair(pair: object, as_json: bool, depth: int) -> tuple[str, str]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise Unreadable("a pair is wanted")
    key, value = pair
    if as_json and not isinstance(key, str | list | dict):
        key = json.dumps(key)
    return _canonical(key, as_json, depth + 1), _canonical(value, as_json, depth + 1)


def _number(value: int | float | Fraction) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return f"nan{next(_nans)}"
        if math.isinf(value):
            return str(value)
        value = Fraction(value)
    if isinstance(value, Fraction):
        if value.denominator != 1:
            return f"{value.numerator:x}/{value.denominator:x}"
        value = value.numerator
    return f"{value:x}"


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        return _number(float("nan" if value.is_nan() else value))
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    if abs(exponent) > _MOST_DIGITS or abs(value.adjusted()) > _MOST_DIGITS:
        raise Unreadable("the decimal is too large")
    return _number(Fraction(value))


def truth(wire: object) -> bool:
    """Return whether Python takes the value for true; an object decides that itself. Raises as `canonical`."""
    if not isinstance(wire, dict):
        return bool(wire)
    if "o" in wire:
        return isinstance(wire["o"], list) and wire["o"][1:] == [True]
    text = canonical(wire, as_json=False)
    return text not in (_number(0), "b", "()", "{}", "d{}")
