"""Calls that this process waits for, by name: for whoever looks at a run that stands still, from another thread.

with waiting(lambda: pending):  # strings, or Ray references whose actor is known
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_waits: list[Callable[[], Iterable[object]]] = []


@contextmanager
def waiting(pending: Callable[[], Iterable[object]]) -> Iterator[None]:
    """Say within the block for whom this process waits. `pending` is called from any thread, and must not block."""
    _waits.append(pending)
    try:
        yield
    finally:
        _waits.remove(pending)


def waited_for() -> list[object]:
    """Return what the innermost wait of this process waits for; nothing where it waits for nobody that it can name."""
    for pending in reversed(_waits.copy()):
        if calls := list(pending()):
            return calls
    return []
