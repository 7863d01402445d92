"""Entries of the table of slime names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """A name that exists here.

    target   `module:name`; a module alone means the module itself
    differs  how its behaviour differs from slime's; empty: it is the same to a caller
    """

    target: str
    differs: str = ""


@dataclass(frozen=True)
class Absent:
    """A name, or a whole module, that does not exist here.

    why      the reason
    instead  what to use or write in its place
    """

    why: str
    instead: str

    @property
    def reason_and_cure(self) -> str:
        """Return the reason and the cure, for an error message."""
        return f"{self.why}; {self.instead}"


Entry = Here | Absent
Names = dict[str, Entry]


def all_from(module: str, *names: str) -> Names:
    """Return entries of names that are the same in `module`."""
    return {name: Here(f"{module}:{name}") for name in names}


def none_of(why: str, instead: str, *names: str) -> Names:
    """Return entries of names that are absent for one reason."""
    return dict.fromkeys(names, Absent(why, instead))
