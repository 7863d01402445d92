"""`read` and `mapfile` of a launch script. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusionrl.compat.slime.scripts.shell import Shell, divided, left
from fusionrl.compat.slime.scripts.syntax import Command

_WITH_VALUE = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}


def read(shell: Shell, words: Sequence[str], command: Command, note: Callable[[str], None]) -> bool | None:
    """Set what `read` and `mapfile` set; it is not known unless a here-string or a here-document has it."""
    names, options = _arguments(words)
    is_lines = words[0] != "read"
    is_array = is_lines or "a" in options
    names = names or ["MAPFILE" if is_lines else "REPLY"]
    if command.text is None:
        for name in names:
            shell.variables[name] = [left("${" + name + "[@]}")] if is_array else left("${" + name + "}")
            note(f"${{{name}}} is read from a command or a file: what it holds is not known")
        return None
    is_document = command.text.endswith("\n")
    text = shell.here_text(command.text, command.is_plain) if is_document else shell.text(command.text)
    separators = next(
        (shell.text(assignment.word) for assignment in command.assignments if assignment.name == "IFS"), " \t\n"
    )
    text = text if is_lines or "d" in options else text.partition("\n")[0]
    if is_lines:
        shell.variables[names[0]] = list(text.rstrip("\n").split("\n"))
    elif is_array:
        shell.variables[names[0]] = divided(text, separators)
    else:
        parts = divided(text, separators, len(names) - 1)
        shell.variables.update(zip(names, [*parts, *[""] * len(names)], strict=False))
    return True


def _arguments(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the names of variables and the options, without their values but for the name after -a."""
    names: list[str] = []
    options = ""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            names.append(word)
            continue
        options += word[1:]
        if word[1:] and word[-1] in _WITH_VALUE[words[0]]:
            value = next(rest, "")
            names += [value] if word[-1] == "a" and words[0] == "read" else []
    return names, options
