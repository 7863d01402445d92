"""Devices that engines and trainers share: who holds what, at which moment.

An engine sizes its KV cache by the memory that is free when it starts, and a trainer by what its model needs. So one of
them is alone on a device whenever it needs all of it, and where both must be there, in a push and its verification,
each holds its weights alone. `tests/runtime/test_turns.py` holds the start, a push and a step to this table.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

StartOrder = Literal["together", "engines first", "trainers first"]

WEIGHTS = "weights"
CACHES = "caches"
"""An engine's KV cache, and its CUDA graphs."""
STATES = "states"
"""A trainer's gradients and optimizer."""


@dataclass(frozen=True)
class Moment:
    """The most that both sides hold of a shared device meanwhile."""

    name: str
    engine: frozenset[str]
    trainer: frozenset[str]

    def allows(self, engine: Set[str], trainer: Set[str]) -> bool:
        """Return whether they may hold this."""
        return engine <= self.engine and trainer <= self.trainer


_ALL_OF_ENGINE, _ALL_OF_TRAINER = frozenset({WEIGHTS, CACHES}), frozenset({WEIGHTS, STATES})
_WEIGHTS, _NOTHING = frozenset({WEIGHTS}), frozenset[str]()

MOMENTS = (
    Moment("the engines start", _ALL_OF_ENGINE, _NOTHING),
    Moment("the trainers start", _NOTHING, _ALL_OF_TRAINER),
    Moment("weights are pushed, and their checksums compared", _WEIGHTS, _WEIGHTS),
    Moment("engines generate", _ALL_OF_ENGINE, _NOTHING),
    Moment("trainers score what engines answered to a probe", _WEIGHTS, _WEIGHTS),
    Moment("trainers train", _NOTHING, _ALL_OF_TRAINER),
)
"""Where engines and trainers give their memory away for each other (--offload-rollout, --offload-train)."""


def is_allowed(engine: Set[str], trainer: Set[str]) -> bool:
    """Return whether there is a moment at which both may hold this."""
    return any(moment.allows(engine, trainer) for moment in MOMENTS)


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
