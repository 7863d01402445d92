"""Read a launch script for the slime commands that it starts. Pure, except that it reads files."""

from __future__ import annotations

import copy
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fusionrl.compat.slime.flags.config_files import with_flags
from fusionrl.compat.slime.scripts.conditions import count, holds
from fusionrl.compat.slime.scripts.launch import Launch, launch_of, programs_of, scripts_within
from fusionrl.compat.slime.scripts.python.launcher import Launcher
from fusionrl.compat.slime.scripts.python.values import PythonError
from fusionrl.compat.slime.scripts.read_builtin import read
from fusionrl.compat.slime.scripts.shell import CLOSE, Shell, ShellError, Value, calculate, left, left_parts, plain
from fusionrl.compat.slime.scripts.syntax import Assignment, Case, Choice, Command, Group, Loop, Step, parse

_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_MAX_ROUNDS = 10_000  # of a loop
_MAX_WHILE = 1000  # the same, of `while` and `until`
_MAX_DEPTH = 20  # of sourced files and of functions that call each other


@dataclass
class Script:
    """The launches of a script, and notes on what is unknown.

    launches  in the order of the script
    notes     a line for each thing that was left out of the reading
    programs  other programs that it starts
    files     texts that it writes, by their paths
    """

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def read_script(path: str | Path, values: Mapping[str, str] | None = None) -> Script:
    """Read the launch script at `path`, bash or Python. `values`: variables of the environment that are known.

    Raises:
        ValueError: the file does not exist, or is not a launch script.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: it cannot be read ({error})") from error
    here = os.path.abspath(file)
    start: dict[str, Value] = dict(values or {})
    run = _Run(Shell(os.path.dirname(here), here, start))
    launcher = Launcher(here, dict(values or {}), run.note)
    run.shell.model_args = launcher.model_args_with
    texts = [text]
    try:
        if file.suffix == ".py":
            launcher.read(text)
            texts, run.script.files = list(dict.fromkeys(launcher.texts)), launcher.files
        for text in texts:
            run.steps(parse(text))
    except (ShellError, PythonError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not run.script.launches:
        programs = ", ".join(dict.fromkeys(run.script.programs))
        reasons = [f"it starts {programs}"] if programs else [plain(note) for note in run.script.notes[:3]]
        raise ValueError("; ".join([f"{path}: it starts no train.py and no train_async.py", *reasons]))
    _files_as_flags(run)
    for name in run.shell.unset:
        run.note(f"${{{name}[@]}}: the script never sets it, so it expands to no arguments")
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
                runs_on = step.connector == "&&"
                if result is None:
                    # Whether it runs is not known: what it sets may hold or not.
                    self.maybe([partial(self.step, step), _nothing], "a condition")
                elif result == runs_on:
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
            is_met = self.steps(condition) if condition else True
            if is_met is False:
                continue
            possible.append(partial(self.steps, body))
            if is_met:
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
            values = [variables.get(name) for variables in after]
            first = values[0]
            if first is not None and all(value == first for value in values):
                merged[name] = first
            elif any(isinstance(value, list) for value in values):
                merged[name] = _common(values, name)
                self.note(f"${{{name}[@]}} depends on {why} that cannot be known")
            else:
                merged[name] = left("${" + name + "}")
        self.shell.variables = merged

    def loop(self, loop: Loop) -> None:
        """Read a loop, round by round where its rounds are known, else once."""
        body = partial(self.steps, loop.body)
        if loop.header is not None:
            self._counted(loop, loop.header)
        elif loop.words is not None:
            items = [item for word in loop.words for item in self.shell.fields(word)]
            if any(left_parts(item) for item in items):
                self.shell.variables[loop.name] = left("${" + loop.name + "}")
                self.maybe([body, _nothing], f"a loop over {plain(' '.join(items))}")
                return
            for item in items:
                self.shell.variables[loop.name] = item
                body()
        else:
            self._while(loop, body)

    def _while(self, loop: Loop, body: Callable[[], object]) -> None:
        """Read the rounds of a `while` or `until` whose condition is known; else, or without an end, one round."""
        for _ in range(_MAX_WHILE):
            before = copy.deepcopy(self.shell.variables)
            is_met = self.steps(loop.condition)
            if is_met is None:
                self.maybe([body, _nothing], "a loop")
            if is_met is None or is_met == loop.is_until:
                return
            body()
            if self.shell.variables == before or loop.is_endless():
                return  # it ends by a `break`, or never

    def _counted(self, loop: Loop, header: str) -> None:
        parts = header.split(";")
        if len(parts) != 3:
            raise ShellError(f"for (({header})): it has not three parts")
        count(self.shell, parts[0])
        for _ in range(_MAX_ROUNDS):
            is_met = calculate(parts[1], self.shell.number)
            if not is_met:
                return
            self.steps(loop.body)
            count(self.shell, parts[2])
        raise ShellError(f"for (({header})): it does not end within {_MAX_ROUNDS} rounds")

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
            return holds(self.shell, command, self.note)
        words = [item for word in command.words for item in self.fields(word)]
        name = words[0] if words else ""
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        self.writes(command)
        if name in ("source", "."):
            self.source(words[1:], command.assignments)
        elif name == "printf" and words[1:2] == ["-v"] and len(words) > 3:
            self.shell.variables[words[2]] = _printf(words[3], words[4:])
            return True
        elif name in ("read", "mapfile", "readarray"):
            return read(self.shell, words, command, self.note)
        elif name == "unset":
            for word in words[1:]:
                self.shell.variables.pop(word, None)
        elif name == "set" and "--" in words:
            self.shell.pass_arguments(words[words.index("--") + 1 :])
        elif name == "shift":
            self.shift(words[1:])
        elif name in self.functions and self.depth < _MAX_DEPTH:
            self.call(words[1:], partial(self.steps, self.functions[name].body))
        elif (launch := launch_of(words)) is not None:
            for assignment in command.assignments:
                self.note(f"the launch sets {assignment.name}: export it before the command if your functions need it")
            self.script.launches.append(launch)
        elif name.startswith("--") and self.script.launches:
            last = self.script.launches[-1]
            self.note(
                f"a `\\` is missing before {plain(name)}: it and what follows are taken as arguments of the launch"
            )
            self.script.launches[-1] = replace(last, argv=(*last.argv, *words))
        elif name in ("bash", "sh") and len(words) > 1 and self.depth < _MAX_DEPTH and self.child(words[1:]):
            return None
        else:
            for text in scripts_within(words):
                self.steps(parse(text))
            self.script.programs += programs_of(words)
        return None

    def call(self, words: Sequence[str], body: Callable[[], object]) -> None:
        """Read `body`, which has `words` as its arguments."""
        before = self.shell.pass_arguments(words)
        self.depth += 1
        try:
            body()
        finally:
            self.depth -= 1
            self.shell.take_back(before)

    def child(self, words: Sequence[str]) -> bool:
        """Read a script that the script runs; return whether it is there. What it sets is its own."""
        words = [word for word in words if not word.startswith("-")]
        if not words or not words[0].endswith(".sh") or _find(words[0], self.shell.folder) is None:
            return False
        variables = self.shell.variables
        self.shell.variables = copy.deepcopy(variables)
        self.call(words[1:], partial(self.source, words[:1], ()))
        self.shell.variables = variables
        return True

    def shift(self, words: Sequence[str]) -> None:
        """Read `shift`: the arguments are known in a function alone."""
        arguments = self.shell.variables.get("@")
        if isinstance(arguments, list):
            self.shell.pass_arguments(arguments[int(words[0]) if words and words[0].isdecimal() else 1 :])

    def writes(self, command: Command) -> None:
        """Keep a file that the script writes from its own text; one whose name is not known is named."""
        if command.text is None or not command.text.endswith("\n"):
            return
        for word in command.outputs:
            path = self.shell.text(word)
            if "$(" in path or "`" in path:
                self.note(f"the script writes {plain(path)} from a here-document: make that file before the command")
            elif path != "/dev/null":
                self.script.files[path] = self.shell.here_text(command.text, command.is_plain)

    def note(self, text: str) -> None:
        """Say something about the reading, once."""
        if text not in self.script.notes:
            self.script.notes.append(text)

    def fields(self, word: str | Assignment) -> list[str]:
        """Return the words that one word of a command expands to."""
        if isinstance(word, Assignment):  # NAME=value among the arguments is a plain word
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


def _files_as_flags(run: _Run) -> None:
    """Replace files of flags (--sglang-config, …), written by the script or in its folder, by the flags."""
    read: list[str] = []

    def text_of(path: str) -> str | None:
        if path in run.script.files:
            return run.script.files[path]
        file = _find(path, run.shell.folder)
        return None if file is None else Path(file).read_text(encoding="utf-8", errors="replace")

    for number, launch in enumerate(run.script.launches):
        argv, done = with_flags(launch.argv, text_of, run.note)
        run.script.launches[number] = replace(launch, argv=tuple(argv))
        read += done
    for path in read:
        run.script.files.pop(path, None)


def _common(values: Sequence[Value | None], name: str) -> list[str]:
    """Return an array that is one of `values`: the words that all of them begin with, and then what is not known."""
    arrays = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
    same = 0
    while all(len(array) > same and array[same] == arrays[0][same] for array in arrays):
        same += 1
    if any(len(array) > same and not array[same].startswith("--") for array in arrays):
        while same and arrays[0][same - 1].startswith("--"):
            same -= 1  # its value may be what differs
    return [*arrays[0][:same], left("$@" if name == "@" else "${" + name + "[@]" + (f":{same}" if same else "") + "}")]


def _nothing() -> None:
    """Stand for a branch that is not taken."""


def _printf(form: str, words: Sequence[str]) -> str:
    items = iter(words)
    return re.sub(r"%[sd]", lambda _: next(items, ""), form).replace("\\n", "\n")


def _find(path: str, folder: str) -> str | None:
    """Return the file that `source path` reads: that file, or the end of its path next to the script or above it.

    A script names the folder of the machine that it was written for: of /root/slime/scripts/models/x.sh the longest
    end that is there counts. A file's name alone is not enough.
    """
    if not left_parts(path) and os.path.isfile(file := os.path.normpath(os.path.join(folder, path))):
        return file
    known = path.rpartition(CLOSE)[2].lstrip("/")  # what follows a folder that is not known
    parts = [part for part in os.path.normpath(known).split(os.sep) if part not in ("", "..", ".")]
    for start in range(max(1, len(parts) - 1)):
        above = folder
        while True:
            if os.path.isfile(file := os.path.join(above, *parts[start:])):
                return file
            if os.path.dirname(above) == above:
                break
            above = os.path.dirname(above)
    return None
