"""Servers that only this machine may ask."""

from __future__ import annotations

THIS_MACHINE = frozenset({"127.0.0.1", "localhost"})


def names_this_machine(host: str | None) -> bool:
    """Return whether a Host header names this machine; a foreign page may let a name of its own point here.

    The port is not looked at: a tunnel has another one, and a browser leaves out port 80.
    """
    return (host or "").partition(":")[0] in THIS_MACHINE
