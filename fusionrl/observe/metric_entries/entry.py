"""An entry of the glossary of metrics. `fusionrl/observe/glossary.py` describes how to add one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One metric.

    unit     what its number counts
    meaning  a sentence or two, with the formula where there is one
    source   the module that computes it, relative to fusionrl/
    when     flags or a mode that it needs; "" if every run of its kind has it
    """

    unit: str
    meaning: str
    source: str
    when: str = ""


Table = dict[str, Entry]
