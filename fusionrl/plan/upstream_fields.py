"""Typed reading of the fields that a user passes through to Megatron and SGLang, by their upstream names."""

from __future__ import annotations

from collections.abc import Mapping


def whole(fields: Mapping[str, object], name: str) -> int | None:
    """A whole number; None where it is not given.

    Raises:
        TypeError: something else.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not a whole number")
    return value


def number(fields: Mapping[str, object], name: str) -> float | None:
    """A number; None where it is not given.

    Raises:
        TypeError: something else.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return value


def text(fields: Mapping[str, object], name: str) -> str | None:
    """A text; None where it is not given.

    Raises:
        TypeError: something else.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a text")
    return value
