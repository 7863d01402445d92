"""Collection of mistakes: all checks run, and all mistakes are listed at once."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def attempt(errors: list[str], check: Callable[[], T]) -> T | None:
    """Return what `check` returns, or None with the message of its `ValueError` in `errors`."""
    try:
        return check()
    except ValueError as error:
        errors.append(str(error))
        return None
