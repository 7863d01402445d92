"""Calls that this process waits for, by name: the watchdog of a stalled run reads them from another thread.

with waiting(lambda: pending):  # strings, or Ray references whose actor is known
    ...
"""

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
    """Return the calls that the innermost wait of this process waits for; [] if it can name none."""
    for pending in reversed(_waits.copy()):
        if calls := list(pending()):
            return calls
    return []
