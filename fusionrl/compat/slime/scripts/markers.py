"""Text of a launch script with parts that only the machine of the run knows. Pure.

Such a part (`${NAME}`, `$(date)`) stays in the text as the script has it, between OPEN and CLOSE, so that a printed
command can have it back.
"""

from __future__ import annotations

import re
import shlex

OPEN, CLOSE = "\ue000", "\ue001"
# Characters within a part while the script runs, so that a shell that reads it a second time leaves it alone.
_PLAIN, _RUNNING = " $()", "\ue002\ue003\ue004\ue005"

_LEFT = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def left(source: str) -> str:
    """Return the text for a part that is left as it is."""
    return OPEN + source + CLOSE


def running(text: str) -> str:
    """Return a part as it is while the script runs."""
    return text.translate(str.maketrans(_PLAIN, _RUNNING))


def stopped(text: str) -> str:
    """Return text of a script that has run, with its parts as `left` makes them."""
    return text.translate(str.maketrans(_RUNNING, _PLAIN))


def plain(text: str) -> str:
    """Return the text without the marks of parts that are left."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def left_parts(text: str) -> list[str]:
    """Return the parts that are left as they are."""
    return _LEFT.findall(text)


def quoted(text: str) -> str:
    """Return the word quoted for a shell: unknown parts are in double quotes, so that the shell expands them."""
    if not left_parts(text):
        return text if _SAFE.fullmatch(text) else shlex.quote(text)
    return f'"{expandable(text)}"'


def expandable(text: str, special: str = r'[\\"$`]') -> str:
    """Return the text as double quotes have it, or a here-document, in which other characters are `special`."""
    parts = _LEFT.split(text)
    return "".join(part if position % 2 else re.sub(special, r"\\\g<0>", part) for position, part in enumerate(parts))
