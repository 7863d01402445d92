"""Words of bash as launch scripts use them: quotes, variables, arrays, arithmetic. Nothing is executed. Pure.

What cannot be known without running the script (`$(nvidia-smi …)`, a variable of the environment) stays in the
expanded text as it is written, between OPEN and CLOSE, so that a printed command can have it back.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

OPEN, CLOSE = "\ue000", "\ue001"  # of a part that is left as it is; private to this room
Value: TypeAlias = "str | list[str]"

_NAME = re.compile(r"[A-Za-z_]\w*")
_LEFT = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_SAFE = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


class ShellError(ValueError):
    """Text that is not bash, or uses bash that this reader lacks."""


def left(source: str) -> str:
    """Return the text for a part that is left as it is; parts within it lose their marks."""
    return OPEN + plain(source) + CLOSE


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


# ------------------------------------------------------------------------------------------------ extents
def closing(text: str, start: int) -> int:
    """Return the position after the part that begins at `start`: a quote, `$(…)`, `<(…)`, `${…}`, `$((…))`,
    or backticks.

    Raises:
        ShellError: it does not end.
    """
    mark = text[start]
    if mark == "'":
        return _after(text, "'", start + 1)
    if mark == "`":
        return _after(text, "`", start + 1)
    if mark == '"':
        return _scan(text, start + 1, '"', quotes=False)
    if text.startswith("$((", start):
        return _scan(text, start + 3, "))")
    if text.startswith(("$(", "<(", ">("), start):
        return _scan(text, start + 2, ")")
    if text.startswith("${", start):
        return _scan(text, start + 2, "}")
    raise AssertionError(f"no part begins with {mark!r}")


def begins_part(text: str, position: int) -> bool:
    """Return whether a quote or an expansion in brackets begins there."""
    return text[position] in "'\"`" or text.startswith(("$(", "${"), position)


def _after(text: str, end: str, start: int) -> int:
    position = text.find(end, start)
    if position < 0:
        raise ShellError(f"a {end} is not closed")
    return position + len(end)


def _scan(text: str, start: int, end: str, quotes: bool = True) -> int:
    position, depth = start, 0
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif depth == 0 and text.startswith(end, position):
            return position + len(end)
        elif text.startswith(("$(", "${"), position) or text[position] == "`" or (quotes and text[position] in "'\""):
            position = closing(text, position)
        else:
            if end != '"' and end != "}":
                depth += {"(": 1, ")": -1}.get(text[position], 0)
            position += 1
    raise ShellError(f"a {end} is missing")


# ------------------------------------------------------------------------------------------------ expansion
@dataclass
class Shell:
    """The variables of a script, as far as they are known.

    folder  of the file that is read
    script  that file
    unset   arrays that were expanded, and that nothing had set
    model_args  what miles' model_args_utils.py prints for a model
    """

    folder: str = "."
    script: str = "script.sh"
    variables: dict[str, Value] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    model_args: Callable[[str, dict[str, str]], str] = lambda model, variables: ""

    def fields(self, word: str) -> list[str]:
        """Return the words that one word of the source expands to: none, one, or several."""
        return _Expansion(self, word).run()

    def text(self, word: str) -> str:
        """Return the expansion of one word of the source without word splitting, as in an assignment."""
        return " ".join(_Expansion(self, word, divide=False).run())

    def pass_arguments(self, words: Sequence[str]) -> dict[str, Value]:
        """Set `$1`, `$2`, …, `$@` of a function or script; return the variables that `take_back` restores."""
        before = {name: value for name, value in self.variables.items() if name == "@" or name.isdecimal()}
        for name in before:
            del self.variables[name]
        self.variables |= {"@": list(words), **{str(place): word for place, word in enumerate(words, 1)}}
        return before

    def take_back(self, before: Mapping[str, Value]) -> None:
        """Restore the arguments of the caller."""
        self.variables = {
            name: value for name, value in self.variables.items() if name != "@" and not name.isdecimal()
        } | dict(before)

    def parameter(self, source: str) -> Value:
        """Return the value of `${source}`; what is not known is left as it is."""
        if source == "#":
            return str(len(self.variables.get("@", [])))  # a script is read as if it were run without arguments
        match = re.fullmatch(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*])(\[[^\]]*\])?(:?[-+=?])?(.*)", source, re.DOTALL)
        if match is None:
            return left("${" + source + "}")
        count, name, index, operation, rest = match.groups()
        if name in "@*":
            name, index = "@", "[@]"
        value = self._element(name, index)
        if count:
            elements = self.variables.get(name)
            return left("${" + source + "}") if elements is None else str(len(elements))
        is_array = index is not None and index[1:-1] in ("@", "*")
        if operation is not None:
            is_set = value is not None and (":" not in operation or value not in ("", [], [""]))
            if operation[-1] in "-=":
                if is_set and value is not None:
                    return value
                default = self._other(rest, is_array)
                if operation[-1] == "=":
                    self.variables[name] = default
                return default
            if operation[-1] == "+":
                return self._other(rest, is_array) if is_set else [] if is_array else ""
            return left("${" + source + "}") if value is None else value
        if value is None and is_array and name != "@":
            if name not in self.unset:
                self.unset.append(name)
            return []  # the environment has no arrays
        if value is None:
            return left("$@" if name == "@" and not rest else "${" + source + "}")
        return self._cut(source, value, rest) if rest else value

    def _other(self, word: str, is_array: bool) -> Value:
        return self.fields(word) if is_array else self.text(word)

    def _element(self, name: str, index: str | None) -> Value | None:
        if name == "BASH_SOURCE" or name == "0":
            return self.script
        value = self.variables.get(name)
        if value is None or index is None or index[1:-1] in ("@", "*"):
            if index is None and isinstance(value, list):
                return value[0] if value else ""
            return [value] if isinstance(value, str) and index is not None else value
        try:
            items = value if isinstance(value, list) else [value]
            return items[int(index[1:-1])]
        except (ValueError, IndexError):
            return None

    def _cut(self, source: str, value: Value, rest: str) -> Value:
        """Cut or change a value: slices, `%` and `#`, `/` and `//` with plain text, upper and lower case.

        All else is left as it is.
        """
        known = [value] if isinstance(value, str) else value
        if (slice_ := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest)) and not any(left_parts(item) for item in known):
            first = int(slice_[1]) - (source[0] in "@*" and slice_[1] != "0")
            return value[first : first + int(slice_[2]) if slice_[2] else None]
        if isinstance(value, str) and not left_parts(value):
            if rest in ("^^", ",,", "^", ","):
                part = len(value) if len(rest) == 2 else 1
                return (value[:part].upper() if rest[0] == "^" else value[:part].lower()) + value[part:]
            if change := re.fullmatch(r"(//?)([\w .:,=-]+|\\?/)(?:/(.*))?", rest, re.DOTALL):
                old, new = change[2].removeprefix("\\"), self.text(change[3] or "")
                return value.replace(old, new, -1 if change[1] == "//" else 1)
        match = re.fullmatch(r"(%%?|##?)(\*?)([\w./-]*)(\*?)", rest)
        if match is None or not isinstance(value, str) or left_parts(value):
            return left("${" + source + "}")
        kind, star, text, last = match.groups()
        if kind[0] == "%":
            position = value.find(text) if kind == "%%" else value.rfind(text)
            return value[:position] if position >= 0 and (last or value.endswith(text)) and text else value
        position = value.rfind(text) if kind == "##" else value.find(text)
        return value[position + len(text) :] if position >= 0 and (star or value.startswith(text)) and text else value

    def command(self, source: str) -> str:
        """Return what `$(source)` prints where that follows from the text alone; else it is left as it is."""
        stripped = re.sub(r"\s*(&>|2>|>)\s*/dev/null|\s*\|\|\s*true", "", source.strip())
        if match := re.fullmatch(
            r"cd\s+(?:--\s+)?(\S+|\"[^\"]*\"|\"?\$\(.*\)[^\s\"]*\"?)\s*&&\s*pwd(?:\s+-P)?", stripped
        ):
            return self._path(match[1], source, lambda path: os.path.normpath(path))
        if match := re.fullmatch(r"dirname\s+(?:--\s+)?(\S+|\".*\")", stripped):
            return self._path(match[1], source, lambda path: os.path.dirname(path) or ".")
        if match := re.fullmatch(r"(?:realpath|readlink\s+-f)\s+(?:--\s+)?(\S+|\".*\")", stripped):
            return self._path(match[1], source, os.path.normpath)
        if match := re.fullmatch(r"basename\s+(?:--\s+)?(\S+|\".*\")", stripped):
            return self._path(match[1], source, os.path.basename)
        if stripped == "pwd":
            return self.folder
        if match := re.fullmatch(r"mktemp\s+([^\s-]\S*)", stripped):
            return self._path(match[1], source, lambda path: path)  # the template names the file well enough
        if match := re.fullmatch(r"IFS=(.+?);\s*echo\s+\"\$\{([A-Za-z_]\w*)\[\*\]\}\"", stripped):
            value = self.variables.get(match[2])
            separator = self.text(match[1])[:1]
            return separator.join(value) if isinstance(value, list) else left(f"$({source})")
        if match := re.fullmatch(r"seq((?:\s+\S+){1,3})", stripped):
            numbers = [int(text) for word in match[1].split() if re.fullmatch(r"-?\d+", text := self.text(word))]
            if len(numbers) == len(match[1].split()):
                first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) == 3 else 1)
                return " ".join(map(str, range(first, numbers[-1] + (1 if step > 0 else -1), step or 1)))
        if match := re.fullmatch(r"((?:\w+=\S+\s+)*)python3?\s+\S*model_args_utils\.py\"?\s+(\S+)", stripped):
            known = {name: value for name, value in self.variables.items() if isinstance(value, str)}
            known |= {name: self.text(word) for name, _, word in (pair.partition("=") for pair in match[1].split())}
            return self.model_args(self.text(match[2]), known) or left(f"$({source})")
        if match := re.fullmatch(r"cat\s*<<(-?)\s*(['\"]?)(\w+)\2[ \t]*\n(.*)\n[ \t]*\3", stripped, re.DOTALL):
            return self.here_text(match[4], is_plain=bool(match[2]))
        if match := re.fullmatch(r"echo\s+([^|;&<>]+)", stripped):
            return " ".join(item for word in split_words(match[1]) for item in self.fields(word))
        return left(f"$({source})")

    def here_text(self, text: str, is_plain: bool) -> str:
        """Return the text of a here-document. `is_plain`: nothing is expanded in it."""
        return text if is_plain else _Expansion(self, text.replace('\\"', '\\\\"')).as_quoted()

    def _path(self, word: str, source: str, change: Callable[[str], str]) -> str:
        path = self.text(word)
        return left(f"$({source})") if left_parts(path) else change(path)

    def arithmetic(self, source: str) -> str:
        """Return the value of `$((source))`; left as it is where a part of it is not known."""
        value = calculate(source, self.number)
        return left(f"$(({source}))") if value is None else str(value)

    def number(self, name: str) -> int | None:
        """Return the whole number that a variable has; None: it is not known."""
        value = self.variables.get(name, "0" if name in self.variables else None)
        try:
            return None if value is None or isinstance(value, list) else int(value or "0")
        except ValueError:
            return None


class _Expansion:
    """One word of the source during its expansion."""

    def __init__(self, shell: Shell, source: str, divide: bool = True) -> None:
        self.shell, self.source, self.divide = shell, source, divide
        self.done: list[str] = []
        self.now = ""
        self.is_there = False  # also where it is empty, but quoted

    def run(self) -> list[str]:
        """Return the words."""
        position = 0
        if self.source == "~" or self.source.startswith("~/"):
            self._add(left("$HOME"))
            position = 1
        while position < len(self.source):
            position = self._step(self.source, position, is_quoted=False)
        self._end()
        return self.done

    def as_quoted(self) -> str:
        """Return the source expanded as within double quotes."""
        position = 0
        while position < len(self.source):
            position = self._step(self.source, position, is_quoted=True)
        return " ".join([*self.done, self.now])

    def _step(self, text: str, position: int, is_quoted: bool) -> int:
        char = text[position]
        if char == "\\" and position + 1 < len(text):
            following = text[position + 1]
            if following != "\n":
                self._add(following if not is_quoted or following in '\\"$`' else char + following)
            return position + 2
        if char == "'" and not is_quoted:
            end = closing(text, position)
            self._add(text[position + 1 : end - 1])
            return end
        if char == '"' and not is_quoted:
            end = closing(text, position)
            inside, at = text[position + 1 : end - 1], 0
            self.is_there = self.is_there or not re.fullmatch(r"\$@|\$\{(?:\w+\[@\]|@).*\}", inside, re.DOTALL)
            while at < len(inside):
                at = self._step(inside, at, is_quoted=True)
            return end
        if char == "`":
            end = closing(text, position)
            self._add(left(text[position:end]))
            return end
        if char == "$":
            return self._dollar(text, position, is_quoted)
        self._add(char)
        return position + 1

    def _dollar(self, text: str, position: int, is_quoted: bool) -> int:
        if text.startswith("$((", position):
            end = closing(text, position)
            self._put(self.shell.arithmetic(text[position + 3 : end - 2]), is_quoted)
        elif text.startswith("$(", position):
            end = closing(text, position)
            self._put(self.shell.command(text[position + 2 : end - 1]), is_quoted)
        elif text.startswith("${", position):
            end = closing(text, position)
            source = text[position + 2 : end - 1]
            has_words = re.match(r"\w+\[@\]:?[-+=]", source) is not None  # which were divided already
            self._put(self.shell.parameter(source), is_quoted or has_words, joined="[*]" in source)
        elif match := _NAME.match(text, position + 1):
            end = match.end()
            self._put(self.shell.parameter(match[0]), is_quoted)
        elif text[position + 1 : position + 2] in tuple("123456789@#*"):
            end = position + 2
            name = text[position + 1]
            value = self.shell.parameter(name)
            self._put(left("$" + name) if value == left("${" + name + "}") else value, is_quoted, joined=name == "*")
        elif text[position + 1 : position + 2] in tuple("0?$!"):
            end = position + 2
            self._put(self.shell.script if text[position + 1] == "0" else left(text[position:end]), is_quoted)
        else:
            end = position + 1
            self._add("$")
        return end

    def _put(self, value: Value, is_quoted: bool, joined: bool = False) -> None:
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and is_quoted and not joined:
            self._several(items)
        elif is_quoted or not self.divide:
            self._add(" ".join(items))
        else:
            text = " ".join(items)
            pieces = divided(text)
            if text[:1].isspace():
                self._end()
            self._several(pieces)
            if text[-1:].isspace():
                self._end()

    def _several(self, items: Sequence[str]) -> None:
        for number, item in enumerate(items):
            if number:
                self._end()
            self._add(item)

    def _add(self, text: str) -> None:
        self.now += text
        self.is_there = True

    def _end(self) -> None:
        if self.is_there:
            self.done.append(self.now)
        self.now, self.is_there = "", False


def divided(text: str, separators: str = " \t\n", most: int = -1) -> list[str]:
    """Return the text divided at `separators`, at `most` of them; those of a part that is left do not divide."""
    spaces = "".join(char for char in separators if char.isspace())
    marks = "".join(char for char in separators if not char.isspace())
    words: list[str] = []
    start, depth = None if spaces else 0, 0
    for position, char in enumerate(text):
        depth += {OPEN: 1, CLOSE: -1}.get(char, 0)
        if depth or char not in separators:
            start = position if start is None else start
        elif len(words) != most:
            if start is not None or char in marks:
                words.append(text[start:position] if start is not None else "")
            start = None if char in spaces or spaces else position + 1
    if start is not None and text[start:]:
        words.append(text[start:].rstrip(spaces) if most >= 0 and spaces else text[start:])
    return words


def split_words(source: str) -> list[str]:
    """Return the words of a line of source, each as it is written; operators do not count as words."""
    words, start, position = [], None, 0
    while position < len(source):
        if source[position].isspace():
            if start is not None:
                words.append(source[start:position])
            start, position = None, position + 1
            continue
        start = position if start is None else start
        if source[position] == "\\":
            position += 2
        else:
            position = closing(source, position) if begins_part(source, position) else position + 1
    return words if start is None else [*words, source[start:]]


# ------------------------------------------------------------------------------------------------ arithmetic
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Lt: lambda a, b: int(a < b),
    ast.LtE: lambda a, b: int(a <= b),
    ast.Gt: lambda a, b: int(a > b),
    ast.GtE: lambda a, b: int(a >= b),
    ast.Eq: lambda a, b: int(a == b),
    ast.NotEq: lambda a, b: int(a != b),
}


def calculate(source: str, number: Callable[[str], int | None]) -> int | None:
    """Return the value of an arithmetic expression of bash; None: it is not known. `number`: of a variable's name."""
    text = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", source).replace("&&", " and ").replace("||", " or ")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, number)
    except (SyntaxError, ZeroDivisionError, ValueError, OverflowError, RecursionError):
        return None


def _value(node: ast.expr, number: Callable[[str], int | None]) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return number(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, number)
        return None if inner is None else -inner
    if isinstance(node, ast.BoolOp):
        values = [_value(operand, number) for operand in node.values]
        if None in values:
            return None
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    pair: tuple[ast.expr, ast.AST, ast.expr] | None = None
    if isinstance(node, ast.BinOp):
        pair = node.left, node.op, node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        pair = node.left, node.ops[0], node.comparators[0]
    if pair is None or type(pair[1]) not in _OPERATORS:
        return None
    first, second = _value(pair[0], number), _value(pair[2], number)
    return None if first is None or second is None else _OPERATORS[type(pair[1])](first, second)
