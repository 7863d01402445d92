"""Numbers of arrays that are mostly short: of a hundred values, Python's own functions cost a tenth of numpy's.

A rollout of short answers asks each sample a dozen times for a sum or an extreme; the calls are what it costs.
"""

from __future__ import annotations

import numpy as np

SHORT = 128  # values
LARGEST = int(np.iinfo(np.int32).max)


def total(values: np.ndarray) -> float:
    """Return the sum of a one-dimensional array, as numpy has it."""
    if len(values) <= SHORT and values.dtype.kind in "iub":
        return sum(values.tolist())
    return values.sum()


def extremes(values: np.ndarray) -> tuple[float, float]:
    """Return (least, largest) of an array that is not empty; NaN is both where there is one."""
    if values.size <= SHORT and values.ndim == 1:
        numbers = values.tolist()
        least, largest = min(numbers), max(numbers)
        if values.dtype.kind != "f" or sum(numbers) == sum(numbers):  # Python's own pass NaN over; a sum does not
            return least, largest
    # Of short arrays `reduce` costs half of what `min` does.
    return np.minimum.reduce(values, axis=None), np.maximum.reduce(values, axis=None)


def are_within(values: np.ndarray, least: float, most: float) -> bool:
    """Return whether all values of an array are from `least` to `most`; NaN is not."""
    if values.size <= SHORT or values.dtype != np.int32 or not 0 <= most <= LARGEST:
        smallest, largest = extremes(values) if values.size else (least, least)
        return bool(smallest >= least and largest <= most)
    if least == 0:  # as unsigned numbers, negative ones are larger than all others
        return bool(np.maximum.reduce(values.view(np.uint32), axis=None) <= most)
    smallest = np.minimum.reduce(values, axis=None)
    return bool(smallest >= least and (most == LARGEST or np.maximum.reduce(values, axis=None) <= most))


def num_positive(values: np.ndarray) -> int:
    """Return how many values of a one-dimensional array are above 0."""
    if len(values) <= SHORT:
        return sum(value > 0 for value in values.tolist())
    return int(np.count_nonzero(values > 0))


def are_equal(values: np.ndarray) -> bool:
    """Return whether all values of a one-dimensional array that is not empty are the same."""
    if len(values) <= SHORT:
        numbers = values.tolist()
        return numbers.count(numbers[0]) == len(numbers)
    return bool((values == values[0]).all())
