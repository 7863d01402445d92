"""Words of messages: counts with their nouns, sizes that divide a count, and mistakes that are listed at once."""

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
BASE = "base"  # what requests call the model without an adapter
SHOWN = 6  # of many the nearest


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes", "0 nodes"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def divisors(count: int) -> list[int]:
    """Every divisor of `count` (at least 1), ascending."""
    low = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return sorted({*low, *(count // size for size in low)})


def dividing(count: int, target: int, *, at_least: int = 1, at_most: int | None = None) -> str:
    """The sizes near `target` that divide `count`, in words: "sizes that divide 12: 1, 2, 3, 4, 6 and 12".

    at_least, at_most  bounds of the sizes
    """
    fitting = [size for size in divisors(count) if at_least <= size <= (at_most or count)]
    nearest = sorted(sorted(fitting, key=lambda size: abs(size - target))[:SHOWN])
    *first, last = [str(size) for size in nearest] or ["none"]
    return f"sizes that divide {count}: " + (f"{', '.join(first)} and {last}" if first else last)


def attempt(errors: list[str], check: Callable[[], T]) -> T | None:
    """Return what `check` returns, or None with the message of its `ValueError` in `errors`."""
    try:
        return check()
    except ValueError as error:
        errors.append(str(error))
        return None
