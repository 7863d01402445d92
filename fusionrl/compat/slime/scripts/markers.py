"""Text of a launch script with parts that only the machine of the run knows. Pure.

Such a part (`${NAME}`, `$(date)`) stays in the text as the script has it, between OPEN and CLOSE, so that a printed
command can have it back.
"""

import re
import shlex

OPEN, CLOSE = "\ue000", "\ue001"
# While the script runs, punctuation within a part is moved here, so that a shell that reads it again leaves it alone.
_AWAY = 0xE100
_RUNNING = {code: code + _AWAY for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
_STOPPED = {running: code for code, running in _RUNNING.items()}

_LEFT = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
# A part that double quotes of a printed command may have as it is, because nothing in it ends them.
_QUOTED = r"""'[^']*'|"(?:[^"\\`$]|\\.|\$(?!\())*"|\\."""
_PLAIN = rf"""[^()'"\\`#<]|(?<=\w)#|<(?!<)|{_QUOTED}"""
_PART = re.compile(rf"\$\{{\w+\}}|\$(?:\d+|@)|\$\((?:{_PLAIN}|\((?:{_PLAIN})*\))*\)", re.ASCII | re.DOTALL)
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def left(source: str) -> str:
    """Return the text for a part that is left as it is."""
    return OPEN + source + CLOSE


def running(source: str) -> str:
    """Return a part that is left as it is, as the script has it while it runs."""
    return OPEN + source.translate(_RUNNING) + CLOSE


def stopped(text: str) -> str:
    """Return text of a script that has run, with its parts as `left` makes them; other marked text is plain."""
    parts = enumerate(_LEFT.split(text.translate(_STOPPED)))
    return "".join(left(part) if place % 2 and _PART.fullmatch(part) else plain(part) for place, part in parts)


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
