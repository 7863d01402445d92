"""Values as JSON that keeps Python's types, so that processes can hand over values and no objects.

None, bool, str, small int and finite float are themselves, a list is a list; everything else is an object of one key:
{"i": hex}, {"f": "nan"}, {"c": [real, imaginary]}, {"b": hex}, {"t": tuple}, {"s": set}, {"z": frozenset},
{"d": [[key, value], …]}, {"F": [numerator, denominator]} in hex, {"D": decimal}; {"o": …} is any other object.

Between a program and its judge also {"n": [dtype, shape, items]} is an array of numpy, {"q": [maxlen, items]} a deque,
{"v": [kind, items]} a view of a dict, and {"T": [type, text or numbers]} a date or a time.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque

TYPE_CHECKING = False  # `typing` takes long to import, and every run would
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 100
_SMALL = 1 << 53
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_TIMES = ("date", "datetime", "time")


def encode(value: Any, encode_object: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return the wire form of `value`; `encode_object(value)` gives that of an object that is not plain data.

    Objects of subclasses become plain ones (a Counter a dict, an IntEnum an int), scalars of numpy Python's numbers.
    """
    if depth > MAX_DEPTH:
        raise ValueError("the value is nested too deeply")

    def inner(values: Any) -> list[Any]:
        return [encode(item, encode_object, depth + 1) for item in values]

    if value is None or type(value) is bool:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL < number < _SMALL else {"i": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"f": repr(real)}
    if isinstance(value, complex):
        return {"c": inner([value.real, value.imag])}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return inner(list.__iter__(value))
    if isinstance(value, dict):
        return {"d": [inner(pair) for pair in dict.items(value)]}
    kinds: tuple[tuple[Any, str], ...] = ((tuple, "t"), (set, "s"), (frozenset, "z"))
    for kind, tag in kinds:
        if isinstance(value, kind):
            return {tag: inner(kind.__iter__(value))}
    name = type(value).__name__
    if name == "Fraction" and "fractions" in sys.modules:
        return {"F": [hex(value.numerator), hex(value.denominator)]}
    if name == "Decimal" and "decimal" in sys.modules:
        return {"D": str(value)}
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        return encode(value.item(), encode_object, depth + 1)
    return encode_object(value)


def encode_library(value: Any, inner: Callable[[Any], Any], encode_object: Callable[[Any], Any]) -> object:
    """Return the wire form of an object of the standard library or of numpy, whose equality needs no program's code.

    `inner(item)` gives the form of an item in it, `encode_object(value)` that of any other object, also of a subclass.
    """
    kind, name = type(value), type(value).__name__
    if kind in _VIEWS:
        return {"v": [_VIEWS.index(kind), [encode(item, inner) for item in value]]}
    if kind is deque:
        return {"q": [value.maxlen, [encode(item, inner) for item in value]]}
    times = sys.modules.get("datetime")
    if times is not None and name in _TIMES and kind is getattr(times, name):
        return {"T": [name, value.isoformat()]}
    if times is not None and kind is times.timedelta:
        return {"T": [name, [value.days, value.seconds, value.microseconds]]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in "biufc":
        return {"n": [value.dtype.str, list(value.shape), [encode(item, inner) for item in value.ravel().tolist()]]}
    return encode_object(value)


def _decode_library(tag: str, payload: Any, decode_object: Callable[[Any], Any]) -> Any:
    first, rest = payload[0], payload[-1]
    if tag == "T":
        import datetime

        if first == "timedelta":
            return datetime.timedelta(*rest)
        return getattr(datetime, _TIMES[_TIMES.index(first)]).fromisoformat(rest)
    items = [decode(item, decode_object) for item in rest]
    if tag == "q":
        return deque(items, first)
    if tag == "v":
        if first == 0:
            return dict.fromkeys(items).keys()
        return dict(enumerate(items)).values() if first == 1 else dict(items).items()
    import numpy

    _, shape, _ = payload
    if first[1:2] not in "biufc" or any(type(item) not in (bool, int, float, complex) for item in items):
        raise ValueError("no array of numbers")
    return numpy.array(items, dtype=first).reshape(shape)


def decode(wire: Any, decode_object: Callable[[Any], Any]) -> Any:
    """Return the value of a wire form; `decode_object(payload)` gives the stand-in of an object."""
    if isinstance(wire, list):
        return [decode(item, decode_object) for item in wire]
    if not isinstance(wire, dict):
        return wire
    ((tag, payload),) = wire.items()
    if tag in ("i", "b", "f", "D"):
        from decimal import Decimal

        readers: dict[str, Callable[[Any], Any]]
        readers = {"i": lambda text: int(text, 16), "b": bytes.fromhex, "f": float, "D": Decimal}
        return readers[tag](payload)
    if tag == "F":
        from fractions import Fraction

        return Fraction(int(payload[0], 16), int(payload[1], 16))
    if tag == "o":
        return decode_object(payload)
    if tag in ("n", "q", "T", "v"):
        return _decode_library(tag, payload, decode_object)
    items = [decode(item, decode_object) for item in payload]
    kinds: dict[str, Callable[[Any], Any]]
    kinds = {"c": lambda parts: complex(*parts), "t": tuple, "s": set, "z": frozenset, "d": dict}
    return kinds[tag](items)


def to_line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"
