"""The built-in rewards of --rm-type: `grade(response, label) -> float`, each a plain function."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any


def exact(response: str, label: Any) -> float:
    """1 where the response, stripped, is the label."""
    return float(response.strip() == str(label).strip())


_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def last_number(response: str, label: Any) -> float:
    """1 where the last number of the response equals the label as a number (thousands separators allowed)."""
    numbers = _NUMBER.findall(response)
    if not numbers:
        return 0.0
    try:
        return float(float(numbers[-1].replace(",", "")) == float(str(label).replace(",", "")))
    except ValueError as error:
        raise ValueError(f"--rm-type last_number: the label {label!r} is no number") from error


def f1(response: str, label: Any) -> float:
    """Word-level F1 of the response against the label, as in SQuAD (lower case, no punctuation, no articles)."""
    predicted, wanted = _words(response), _words(str(label))
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if not common:
        return float(predicted == wanted)
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    text = re.sub(r"[^\w\s]", "", text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def math(response: str, label: Any) -> float:
    """1 where math-verify finds the response's final answer equal to the label.

    Raises:
        ValueError: the package math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError("--rm-type math needs the package math-verify; pip install math-verify") from error
    # Its time limits use SIGALRM, which works in the main thread alone; rewards run beside it.
    gold = parse(f"${label}$" if "\\" in str(label) else str(label), parsing_timeout=None)
    return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


def random_reward(response: str, label: Any) -> float:
    """0 or 1 by a coin: a control experiment."""
    return float(random.random() < 0.5)


RM_TYPES: dict[str, Callable[[str, Any], float]] = {
    "exact": exact,
    "last_number": last_number,
    "math": math,
    "f1": f1,
    "random": random_reward,
}
