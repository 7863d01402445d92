"""Typed reading of the fields that a user passes through to Megatron and SGLang, by their upstream names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def passed(fields: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    """Return the value of a field; None where it is not given. A whole number counts as a float.

    Raises:
        TypeError: something else.
    """
    value = fields.get(name)
    if kind is float and isinstance(value, int):
        value = float(value)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value
