"""Conditions of a launch script: `[[ … ]]`, `test`, `((…))`. None means unknown. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fusionrl.compat.slime.scripts.shell import Shell, calculate, left, left_parts, plain
from fusionrl.compat.slime.scripts.syntax import Command


def count(shell: Shell, source: str) -> bool | None:
    """Read `i=0`, `i++` or `i+=2`; anything else is a condition."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*]?)=(?!=)(.+))\s*", source)
    if match is None:
        value = calculate(source, shell.number)
        return None if value is None else bool(value)
    name, step, operation, rest = match.groups()
    expression = f"{name} {step[0]} 1" if step else (f"{name} {operation} ({rest})" if operation else rest)
    value = calculate(expression, shell.number)
    shell.variables[name] = left("${" + name + "}") if value is None else str(value)
    return None if value is None else bool(value)


def holds(shell: Shell, command: Command, note: Callable[[str], None]) -> bool | None:
    """Return whether a condition holds; None: it is not known."""
    words = [word for word in command.words if isinstance(word, str)]
    if words[0] == "((":
        return count(shell, re.sub(r"\$(?:#|\{#\})", shell.text("$#"), words[1]))
    words = words[1:-1] if words[0] in ("[", "[[") else words[1:]
    for connector, deciding in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if connector in words:
            at = words.index(connector)
            sides = [_one(shell, words[:at], note), holds(shell, Command(words=["test", *words[at + 1 :]]), note)]
            return deciding if deciding in sides else (None if None in sides else not deciding)
    return _one(shell, words, note)


def _one(shell: Shell, words: Sequence[str], note: Callable[[str], None]) -> bool | None:
    if words[:1] == ["!"]:
        inner = _one(shell, words[1:], note)
        return None if inner is None else not inner
    values = [shell.text(word) for word in words]
    if len(values) == 2 and values[0] in ("-z", "-n") and (name := _alone(values[1])) is not None:
        note(f"${{{name}}} is taken as not set")
        values[1] = ""
    if any(left_parts(value) for value in values):
        return None
    if len(values) == 2 and values[0] in ("-z", "-n"):
        return (values[1] == "") == (values[0] == "-z")
    if len(values) == 1:
        return values[0] != ""
    if len(values) != 3:
        return None  # of files: what is on the machine of the run is not known
    first, kind, second = values
    if kind in ("=", "==", "!="):
        return None if "*" in second else (first == second) == (kind != "!=")
    try:
        pair = int(first), int(second)
    except ValueError:
        return None
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    value = calculate(f"{pair[0]} {numbers[kind]} {pair[1]}", lambda _: None) if kind in numbers else None
    return None if value is None else bool(value)


def _alone(value: str) -> str | None:
    """Return the name of the variable that is all of a value, and of which nothing is known."""
    match = re.fullmatch(r"\$\{([A-Za-z_]\w*)\}", plain(value))
    return match[1] if match is not None and left_parts(value) == [plain(value)] else None
