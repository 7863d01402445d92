"""Text of bash → its statements, as far as launch scripts need them. Words are kept as they are written. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from fusionrl.compat.slime.scripts.shell import ShellError, begins_part, closing

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
_FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>&|<&|>\||<<<|>|<)\s*")
_CONNECTORS = ("&&", "||", "|&", "|", ";;", ";", "&", "\n")


@dataclass(frozen=True)
class Assignment:
    """NAME=word, NAME+=word, NAME=(word …): `items` are the words of an array, None of a plain value."""

    name: str
    adds: bool
    word: str
    items: tuple[str, ...] | None = None
    index: str | None = None


@dataclass
class Command:
    """A simple command: assignments in front of it, and its words.

    text      what its standard input has, as the source writes it: a here-string or a here-document; None: neither
    is_plain  nothing is expanded in that text
    outputs   the files that it writes
    """

    assignments: list[Assignment] = field(default_factory=list)
    words: list[str | Assignment] = field(default_factory=list)
    text: str | None = None
    is_plain: bool = False
    outputs: list[str] = field(default_factory=list)


@dataclass
class Choice:
    """if … elif … else; a branch is its condition and its statements, and one without a condition is the else."""

    branches: list[tuple[list[Step], list[Step]]]


@dataclass
class Case:
    """case WORD in …; a branch is its patterns and its statements."""

    word: str
    branches: list[tuple[list[str], list[Step]]]


@dataclass
class Loop:
    """A loop. `words` of `for NAME in words`; `header` of `for ((…))`; neither: `condition` of while and until."""

    body: list[Step]
    condition: list[Step] = field(default_factory=list)
    is_until: bool = False
    name: str = ""
    words: list[str] | None = None
    header: str | None = None

    def is_endless(self) -> bool:
        """Return whether the condition is a mere `true`."""
        return [getattr(step.statement, "words", None) for step in self.condition] in ([["true"]], [[":"]])


@dataclass
class Group:
    """Statements in braces or parentheses; with a name, a function's."""

    body: list[Step]
    function: str | None = None


Statement: TypeAlias = "Command | Choice | Case | Loop | Group"


@dataclass
class Step:
    """A statement, `connector` between it and the one before, and whether `!` stands before it."""

    connector: str
    statement: Statement
    is_negated: bool = False


def parse(text: str) -> list[Step]:
    """Return the statements of a script.

    Raises:
        ShellError: it is not closed somewhere, or has a form that is not read here.
    """
    reader = _Reader(text)
    steps = reader.steps(())
    if reader.position < len(text):
        raise ShellError(f"line {reader.line()}: {reader.rest()!r} is not expected here")
    return steps


class _Reader:
    """The text, and how far it is read."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.heredocs: list[tuple[bool, str, Command]] = []

    def line(self) -> int:
        """Return the number of the line that is read."""
        return self.text.count("\n", 0, self.position) + 1

    def rest(self) -> str:
        """Return the rest of the line, for a message."""
        return self.text[self.position : self.position + 40].partition("\n")[0]

    # -------------------------------------------------------------------------------------------- space
    def blanks(self, lines: bool = False) -> None:
        """Skip spaces, comments and continued lines; with `lines`, ends of lines and `;` too."""
        while self.position < len(self.text):
            char = self.text[self.position]
            if char in " \t\r" or (lines and char == ";" and not self.text.startswith(";;", self.position)):
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif char == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif lines and char == "\n":
                self.newline()
            else:
                return

    def newline(self) -> None:
        """Pass the end of a line, and the here-documents that begin after it."""
        self.position += 1
        for strips, end, command in self.heredocs:
            lines: list[str] = []
            while self.position < len(self.text):
                stop = self.text.find("\n", self.position)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.position : stop].lstrip("\t" if strips else "")
                self.position = min(stop + 1, len(self.text))
                if line == end:
                    break
                lines.append(line + "\n")
            command.text = "".join(lines)
        self.heredocs = []

    def word(self) -> str:
        """Read one word as it is written; nothing where an operator stands."""
        start = self.position
        while self.position < len(self.text):
            if self.text[self.position] == "\\":
                self.position += 2
            elif begins_part(self.text, self.position):
                self.position = closing(self.text, self.position)
            elif self.text[self.position] in " \t\r\n;&|()<>":
                break
            else:
                self.position += 1
        return self.text[start : self.position]

    def peek(self) -> str:
        """Return the next word without reading it."""
        start = self.position
        try:
            return self.word()
        finally:
            self.position = start

    def expect(self, word: str) -> None:
        """Read the keyword `word`.

        Raises:
            ShellError: the text continues differently.
        """
        self.blanks(lines=True)
        if self.word() != word:
            raise ShellError(f"line {self.line()}: {word} is missing")

    # -------------------------------------------------------------------------------------------- statements
    def steps(self, ends: tuple[str, ...]) -> list[Step]:
        """Read statements up to one of the keywords `ends`, which is left unread."""
        steps: list[Step] = []
        connector = ";"
        while True:
            self.blanks(lines=connector in (";", "&&", "||", "|"))
            if self.position >= len(self.text) or self.peek() in ends or self.text[self.position] in ")":
                return steps
            if self.text.startswith("}", self.position) and "}" in ends:
                return steps
            if self.text.startswith(";;", self.position):
                return steps
            negated = False
            while self.peek() == "!":
                self.word()
                self.blanks()
                negated = not negated
            before = self.position
            statement = self.statement()
            if self.position == before:
                raise ShellError(f"line {self.line()}: {self.rest()!r} is not expected here")
            steps.append(Step(connector, statement, negated))
            self.redirections()
            connector = next((c for c in _CONNECTORS if self.text.startswith(c, self.position)), "")
            if connector in ("", ";;"):
                return steps
            if connector == "\n":
                self.newline()
            else:
                self.position += len(connector)
            connector = ";" if connector in ("\n", "&") else connector.replace("|&", "|")

    def statement(self) -> Statement:
        """Read one statement."""
        if self.text.startswith("((", self.position):
            return Command(words=["((", self.double()])
        if self.text[self.position] == "(":
            self.position += 1
            return Group(self.until(")"))
        if match := _FUNCTION.match(self.text, self.position):
            self.position = match.end()
            self.blanks(lines=True)
            body = self.statement()
            return Group([Step(";", body)], function=match[1])
        keyword = self.peek()
        if keyword == "{":
            self.word()
            body_steps = self.steps(("}",))
            self.expect("}")
            return Group(body_steps)
        if keyword == "if":
            return self.choice()
        if keyword in ("for", "while", "until"):
            return self.loop()
        if keyword == "case":
            return self.case()
        if keyword == "select":
            raise ShellError(f"line {self.line()}: `{keyword}` is not read")
        return self.command()

    def until(self, end: str) -> list[Step]:
        """Read statements up to the operator `end`, and that too."""
        steps = self.steps(())
        self.blanks(lines=True)
        if not self.text.startswith(end, self.position):
            raise ShellError(f"line {self.line()}: {end} is missing")
        self.position += len(end)
        return steps

    def double(self) -> str:
        """Read `((…))`; returns what is between."""
        end = closing("$" + self.text[self.position :], 0) - 1 + self.position
        source = self.text[self.position + 2 : end - 2]
        self.position = end
        return source

    def choice(self) -> Choice:
        """Read an `if`."""
        branches: list[tuple[list[Step], list[Step]]] = []
        self.word()
        while True:
            condition = self.steps(("then",))
            self.expect("then")
            branches.append((condition, self.steps(("elif", "else", "fi"))))
            self.blanks(lines=True)
            keyword = self.word()
            if keyword == "else":
                branches.append(([], self.steps(("fi",))))
                self.expect("fi")
            elif keyword not in ("elif", "fi"):
                raise ShellError(f"line {self.line()}: fi is missing")
            if keyword != "elif":
                return Choice(branches)

    def case(self) -> Case:
        """Read a `case`."""
        self.word()
        self.blanks()
        case = Case(self.word(), [])
        self.expect("in")
        while True:
            self.blanks(lines=True)
            if self.peek() == "esac":
                self.word()
                return case
            patterns: list[str] = []
            while not self.text.startswith(")", self.position):
                self.blanks()
                if self.text[self.position : self.position + 1] in ("(", "|"):
                    self.position += 1
                elif word := self.word():
                    patterns.append(word)
                else:
                    raise ShellError(f"line {self.line()}: esac is missing")
                self.blanks()
            self.position += 1
            case.branches.append((patterns, self.steps(("esac",))))
            self.blanks(lines=True)
            if self.text.startswith(";;", self.position):
                self.position += 2

    def loop(self) -> Loop:
        """Read a `for`, `while` or `until`."""
        loop = Loop([])
        keyword = self.word()
        if keyword == "for":
            self.blanks()
            if self.text.startswith("((", self.position):
                loop.header = self.double()
            else:
                loop.name = self.word()
                loop.words = ['"$@"']
                self.blanks(lines=True)
                if self.peek() == "in":
                    loop.words = []
                    self.word()
                    self.blanks()
                    while word := self.word():
                        loop.words.append(word)
                        self.blanks()
        else:
            loop.condition, loop.is_until = self.steps(("do",)), keyword == "until"
        self.expect("do")
        loop.body = self.steps(("done",))
        self.expect("done")
        return loop

    # -------------------------------------------------------------------------------------------- simple commands
    def command(self) -> Command:
        """Read a simple command."""
        command = Command()
        while True:
            self.redirections(command)
            assignment = self.assignment()
            if assignment is not None:
                (command.words if command.words else command.assignments).append(assignment)
                continue
            word = self.word()
            if not word:
                return command
            command.words.append(word)
            if word == "[[" and len(command.words) == 1:
                self.test(command)

    def test(self, command: Command) -> None:
        """Read the words of `[[ … ]]`, in which `&&` and `||` are words."""
        while True:
            self.blanks()
            if self.position >= len(self.text) or self.text[self.position] == "\n":
                raise ShellError(f"line {self.line()}: ]] is missing")
            operator = next((c for c in ("&&", "||", "(", ")", "<", ">") if self.text.startswith(c, self.position)), "")
            self.position += len(operator)
            word = operator or self.word()
            command.words.append(word)
            if word == "]]":
                return

    def assignment(self) -> Assignment | None:
        """Read an assignment, if one follows."""
        match = _ASSIGNMENT.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        if not self.text.startswith("(", self.position):
            return Assignment(match[1], bool(match[3]), self.word(), index=match[2])
        self.position += 1
        items: list[str] = []
        while True:
            self.blanks(lines=True)
            if self.text.startswith(")", self.position):
                self.position += 1
                return Assignment(match[1], bool(match[3]), "", tuple(items))
            word = self.word()
            if not word:
                raise ShellError(f"line {self.line()}: an array is not closed, or has an operator in it")
            items.append(word)

    def redirections(self, command: Command | None = None) -> None:
        """Pass spaces and redirections; `command` gets the text of its standard input and the files that it writes."""
        command = command or Command()
        while True:
            self.blanks()
            heredoc = _HEREDOC.match(self.text, self.position)
            if heredoc and not self.text.startswith("<<<", self.position):
                command.is_plain = bool(heredoc[2])
                self.heredocs.append((bool(heredoc[1]), heredoc[3], command))
                self.position = heredoc.end()
                continue
            match = _REDIRECTION.match(self.text, self.position)
            if match is None or not match[0]:
                return
            process = next((at for at in (self.position, match.end()) if self.text[at : at + 2] in ("<(", ">(")), None)
            if process is not None:
                self.position = closing(self.text, process)
                continue
            self.position = match.end()
            word, operator = self.word(), match[0].strip()
            command.text = word if operator == "<<<" else command.text
            command.outputs += [word] if operator in (">", ">>", ">|") else []
