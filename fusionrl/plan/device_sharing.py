"""Devices that engines and trainers share: who holds what, at which moment.

An engine sizes its KV cache by the memory that is free when it starts, and a trainer by what its model needs. So one of
them is alone on a device whenever it needs all of it, and where both must be there, in a push and its verification,
each holds its weights alone. A table in `tests/runtime/test_turns.py` checks the start, a push and a step.
"""

from __future__ import annotations

from typing import Literal

StartOrder = Literal["together", "engines first", "trainers first"]


def described(order: StartOrder) -> str:
    """Return who holds the shared devices when, for plan.txt."""
    if order == "engines first":
        return (
            "engines start alone, then trainers; in a push and its check each side holds its weights alone; engines"
            " generate alone; trainers train alone"
        )
    return "trainers start alone, then engines in what is left; engines keep their memory"


def start_order(takes_turns: bool, engines_give_memory: bool) -> StartOrder:
    """Return who starts before whom on the devices.

    Engines that give their memory away start first, on empty devices. Engines that keep it start last, so that they
    find what the trainers leave to them.
    """
    if not takes_turns:
        return "together"
    return "engines first" if engines_give_memory else "trainers first"
