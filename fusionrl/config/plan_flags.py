"""Flags that only `fusionrl plan` has."""

import argparse
from collections.abc import Sequence

# name → (values, default, what it does)
PLAN_FLAGS: dict[str, tuple[str, str, str]] = {
    "--cluster": (
        "NODESxGPUSxKIND",
        "",
        "Plan for this cluster instead of this machine, e.g. 8x8xh200. --hf-checkpoint may be a config.json alone,"
        " and so may a teacher or a reward model; nothing else is read. docs/guides/check.md has the kinds.",
    ),
    "--router-imbalance": (
        "number",
        "1.0",
        "Mixtures of experts, memory estimate: tokens that the busiest expert-parallel rank gets, for each token of an"
        " even share.",
    ),
}


def take_plan_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(values of PLAN_FLAGS, the rest of a command line, errors)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in PLAN_FLAGS:
        parser.add_argument(flag, dest=flag, nargs="?", default=argparse.SUPPRESS)
    parsed, rest = parser.parse_known_args(argv)
    values = {flag: text for flag, text in vars(parsed).items() if text}
    errors = [f"{flag}: it needs a value, {PLAN_FLAGS[flag][0]}" for flag in vars(parsed) if flag not in values]
    return values, rest, errors


def imbalance_of(values: dict[str, str]) -> float:
    """The value of --router-imbalance. ValueError: no number of at least 1."""
    text = values.get("--router-imbalance", "1.0")
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise ValueError(f"--router-imbalance {text}: a number of at least 1")
    return number
