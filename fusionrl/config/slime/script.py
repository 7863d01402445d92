"""A launch script → the commands of slime's that it starts. It is read, never run. Pure but for reading files."""

from __future__ import annotations

import copy
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fusionrl.config.slime.shell import CLOSE, Shell, ShellError, Value, calculate, left, left_parts, plain
from fusionrl.config.slime.syntax import Assignment, Case, Choice, Command, Group, Loop, Step, parse

_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_MAX_ROUNDS = 10_000  # of a loop
_MAX_DEPTH = 20  # of sourced files and of functions that call each other
_PROGRAM = re.compile(r"(?:.*/)?(train|train_async)\.py")


@dataclass(frozen=True)
class Launch:
    """A command that starts a run.

    program  `train` or `train_async`
    argv     its arguments; parts that cannot be known are marked (see `shell`)
    env      the variables that a Ray job's --runtime-env-json sets, as text
    """

    program: str
    argv: tuple[str, ...]
    env: str | None = None


@dataclass
class Script:
    """What a launch script starts, and what of it could not be known.

    launches  in the order of the script
    notes     a line for each thing that was left out of the reading
    """

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: str | Path, values: Mapping[str, str] | None = None) -> Script:
    """Read the launch script at `path`. `values`: variables of the environment that are known.

    Raises:
        ValueError: no such file, or text that is no bash.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: it cannot be read ({error})") from error
    here = os.path.abspath(file)
    start: dict[str, Value] = dict(values or {})
    run = _Run(Shell(os.path.dirname(here), here, start))
    try:
        run.steps(parse(text))
    except ShellError as error:
        raise ValueError(f"{path}: {error}") from error
    if not run.script.launches:
        raise ValueError(f"{path}: it starts no train.py and no train_async.py")
    return run.script


class _Run:
    """The reading of a script: statement by statement, with the variables as they are at that point."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.script = Script()
        self.functions: dict[str, Group] = {}
        self.depth = 0

    # -------------------------------------------------------------------------------------------- statements
    def steps(self, steps: Sequence[Step]) -> bool | None:
        """Read statements; returns whether the last one succeeds, None where that is not known."""
        result: bool | None = True
        for step in steps:
            if step.connector in ("&&", "||"):
                wanted = step.connector == "&&"
                if result is None:
                    # Whether it runs is not known: what it sets may hold or not.
                    self.maybe([partial(self.step, step), _nothing], "a condition")
                elif result == wanted:
                    result = self.step(step)
            else:
                result = self.step(step)
        return result

    def step(self, step: Step) -> bool | None:
        """Read one statement; returns whether it succeeds."""
        statement = step.statement
        result: bool | None = None
        if isinstance(statement, Command):
            result = self.command(statement)
        elif isinstance(statement, Choice):
            self.choice(statement)
        elif isinstance(statement, Case):
            self.case(statement)
        elif isinstance(statement, Loop):
            self.loop(statement)
        elif statement.function is not None:
            self.functions[statement.function] = statement
        else:
            result = self.steps(statement.body)
        return (not result) if step.is_negated and result is not None else result

    def choice(self, choice: Choice) -> None:
        """Read an `if`: the branch that is taken, or where that is not known each on its own."""
        possible: list[Callable[[], object]] = []
        for condition, body in choice.branches:
            holds = self.steps(condition) if condition else True
            if holds is False:
                continue
            possible.append(partial(self.steps, body))
            if holds:
                break
        else:
            possible.append(_nothing)
        if len(possible) == 1:
            possible[0]()
        else:
            self.maybe(possible, "an `if`")

    def case(self, case: Case) -> None:
        """Read a `case`: the branch that fits, or where the word is not known each on its own."""
        word = self.shell.text(case.word)
        if left_parts(word):
            bodies: list[Callable[[], object]] = [partial(self.steps, body) for _, body in case.branches]
            self.maybe([*bodies, _nothing], "a `case`")
            return
        for patterns, body in case.branches:
            if any(fnmatch.fnmatchcase(word, self.shell.text(pattern)) for pattern in patterns):
                self.steps(body)
                return

    def maybe(self, branches: Sequence[Callable[[], object]], why: str) -> None:
        """Read each branch on its own; a variable that they leave with different values is not known from here on."""
        before = self.shell.variables
        after: list[dict[str, Value]] = []
        for branch in branches:
            self.shell.variables = copy.deepcopy(before)
            branch()
            after.append(self.shell.variables)
        merged: dict[str, Value] = {}
        for name in dict.fromkeys(name for values in after for name in values):
            values = [one.get(name) for one in after]
            first = values[0]
            if first is not None and all(value == first for value in values):
                merged[name] = first
            elif any(isinstance(value, list) for value in values):
                merged[name] = [left("${" + name + "[@]}")]
                self.note(f"${{{name}[@]}} depends on {why} that cannot be known")
            else:
                merged[name] = left("${" + name + "}")
        self.shell.variables = merged

    def loop(self, loop: Loop) -> None:
        """Read a loop, round by round where its rounds are known."""
        if loop.header is not None:
            self._counted(loop, loop.header)
        elif loop.words is not None:
            items = [item for word in loop.words for item in self.shell.fields(word)]
            if any(left_parts(item) for item in items):
                return  # over hosts, as a rule: nothing that a launch needs
            for item in items:
                self.shell.variables[loop.name] = item
                self.steps(loop.body)

    def _counted(self, loop: Loop, header: str) -> None:
        parts = header.split(";")
        if len(parts) != 3:
            raise ShellError(f"for (({header})): it has not three parts")
        self._count(parts[0])
        for _ in range(_MAX_ROUNDS):
            holds = calculate(parts[1], self.shell.number)
            if not holds:
                return
            self.steps(loop.body)
            self._count(parts[2])
        raise ShellError(f"for (({header})): it does not end within {_MAX_ROUNDS} rounds")

    def _count(self, source: str) -> bool | None:
        """Read `i=0`, `i++` or `i+=2`; anything else is a condition."""
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*]?)=(?!=)(.+))\s*", source)
        if match is None:
            value = calculate(source, self.shell.number)
            return None if value is None else bool(value)
        name, step, operation, rest = match.groups()
        expression = f"{name} {step[0]} 1" if step else (f"{name} {operation} ({rest})" if operation else rest)
        value = calculate(expression, self.shell.number)
        self.shell.variables[name] = left("${" + name + "}") if value is None else str(value)
        return None if value is None else bool(value)

    # -------------------------------------------------------------------------------------------- commands
    def command(self, command: Command) -> bool | None:
        """Read a simple command; returns whether it succeeds."""
        if not command.words:
            for assignment in command.assignments:
                self.assign(assignment)
            return True
        first = command.words[0]
        if isinstance(first, str) and first in _DECLARING:
            for word in command.words[1:]:
                if isinstance(word, Assignment):
                    self.assign(word)
            return True
        if first in ("[[", "((", "[", "test"):
            return self.test(command)
        words = [item for word in command.words for item in self.fields(word)]
        name = words[0] if words else ""
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name in ("source", "."):
            self.source(words[1:], command.assignments)
        elif name == "printf" and words[1:2] == ["-v"] and len(words) > 3:
            self.shell.variables[words[2]] = _printf(words[3], words[4:])
            return True
        elif name == "unset":
            for word in words[1:]:
                self.shell.variables.pop(word, None)
        elif name in self.functions and self.depth < _MAX_DEPTH:
            self.depth += 1
            self.steps(self.functions[name].body)
            self.depth -= 1
        elif (launch := launch_of(words)) is not None:
            self.script.launches.append(launch)
        elif name.startswith("--") and self.script.launches:
            last = self.script.launches[-1]
            self.note(
                f"a `\\` is missing before {plain(name)}: it and what follows are taken as arguments of the launch"
            )
            self.script.launches[-1] = replace(last, argv=(*last.argv, *words))
        return None

    def note(self, text: str) -> None:
        """Say something about the reading, once."""
        if text not in self.script.notes:
            self.script.notes.append(text)

    def fields(self, word: str | Assignment) -> list[str]:
        """Return the words that one word of a command stands for."""
        if isinstance(word, Assignment):  # NAME=value in the place of an argument is a plain word
            return [f"{word.name}{'+' if word.adds else ''}={self.shell.text(word.word)}"]
        return self.shell.fields(word)

    def assign(self, assignment: Assignment) -> None:
        """Set a variable."""
        variables, name = self.shell.variables, assignment.name
        if assignment.items is not None:
            items = [item for word in assignment.items for item in self.shell.fields(word)]
            before = variables.get(name, []) if assignment.adds else []
            variables[name] = [*([before] if isinstance(before, str) else before), *items]
            return
        text = self.shell.text(assignment.word)
        index, there = (assignment.index or "")[1:-1], variables.get(name)
        if index.isdecimal() and isinstance(there, list) and int(index) < len(there):
            there[int(index)] = text
        elif assignment.index is not None:
            variables[name] = [left("${" + name + "[@]}")]  # an associative array, as a rule
        elif assignment.adds:
            old = variables.get(name, "")
            variables[name] = [*old, text] if isinstance(old, list) else old + text
        else:
            variables[name] = text

    def source(self, words: Sequence[str], assignments: Sequence[Assignment]) -> None:
        """Read a sourced file in place."""
        if not words:
            return
        path = _find(words[0], self.shell.folder)
        if path is None or self.depth >= _MAX_DEPTH:
            self.note(f"source {plain(words[0])}: the file is not there, what it sets is not known")
            return
        if os.path.isabs(words[0]) and os.path.normpath(words[0]) != path:
            self.note(f"source {plain(words[0])}: read from {path}")
        before = dict(self.shell.variables)
        for assignment in assignments:
            self.assign(assignment)
        folder, script = self.shell.folder, self.shell.script
        self.shell.folder, self.shell.script = os.path.dirname(path), path
        self.depth += 1
        try:
            self.steps(parse(Path(path).read_text(encoding="utf-8")))
        except ShellError as error:
            raise ShellError(f"{path}: {error}") from error
        finally:
            self.depth -= 1
            self.shell.folder, self.shell.script = folder, script
        for assignment in assignments:
            self.shell.variables.pop(assignment.name, None)
            if assignment.name in before:
                self.shell.variables[assignment.name] = before[assignment.name]

    def test(self, command: Command) -> bool | None:
        """Return whether a condition holds; None: it is not known."""
        words = [word for word in command.words if isinstance(word, str)]
        if words[0] == "((":
            return self._count(words[1])
        words = words[1:-1] if words[0] in ("[", "[[") else words[1:]
        for connector, wanted in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if connector in words:
                at = words.index(connector)
                found = [self._one(words[:at]), self.test(Command(words=["test", *words[at + 1 :]]))]
                return wanted if wanted in found else (None if None in found else not wanted)
        return self._one(words)

    def _one(self, words: Sequence[str]) -> bool | None:
        if words[:1] == ["!"]:
            inner = self._one(words[1:])
            return None if inner is None else not inner
        values = [self.shell.text(word) for word in words]
        if len(values) == 2 and values[0] in ("-z", "-n") and (name := _alone(values[1])) is not None:
            self.note(f"${{{name}}} is taken as not set")
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


def launch_of(words: Sequence[str]) -> Launch | None:
    """Return the launch that a command is: `python train.py …`, or a Ray job of it; None: something else."""
    for position, word in enumerate(words):
        match = _PROGRAM.fullmatch(plain(word))
        if match is None:
            continue
        before = words[:position]
        if not any("python" in one or one == "--" for one in before) and position:
            return None
        prefix = "--runtime-env-json="
        env = next((one.removeprefix(prefix) for one in before if one.startswith(prefix)), None)
        if env is None and "--runtime-env-json" in before[:-1]:
            env = before[list(before).index("--runtime-env-json") + 1]
        return Launch(match[1], tuple(words[position + 1 :]), env)
    return None


def _nothing() -> None:
    """Stand for a branch that is not taken."""


def _alone(value: str) -> str | None:
    """Return the name of the variable that is all of a value, and of which nothing is known."""
    match = re.fullmatch(r"\$\{([A-Za-z_]\w*)\}", plain(value))
    return match[1] if match is not None and left_parts(value) == [plain(value)] else None


def _printf(form: str, words: Sequence[str]) -> str:
    items = iter(words)
    return re.sub(r"%[sd]", lambda _: next(items, ""), form).replace("\\n", "\n")


def _find(path: str, folder: str) -> str | None:
    """Return the file that `source path` reads: that file, or the end of its path beside the script or above it.

    A script names the folder of the machine that it was written for: of /root/slime/scripts/models/x.sh the longest
    end that is there counts. A file's name alone is not enough.
    """
    if not left_parts(path) and os.path.isfile(found := os.path.normpath(os.path.join(folder, path))):
        return found
    known = path.rpartition(CLOSE)[2].lstrip("/")  # what follows a folder that is not known
    parts = [part for part in os.path.normpath(known).split(os.sep) if part not in ("", "..", ".")]
    for start in range(max(1, len(parts) - 1)):
        above = folder
        while True:
            if os.path.isfile(found := os.path.join(above, *parts[start:])):
                return found
            if os.path.dirname(above) == above:
                break
            above = os.path.dirname(above)
    return None
