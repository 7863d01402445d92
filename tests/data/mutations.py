"""Spoil good prompt data in hundreds of ways, and see what the plan, `fusionrl data check` and a run say to each.

Each mutation is a file (or a folder) of a few rows of which something was changed, and says what must become of it:

    refused  not one row is trained on; the message names the place and the cause
    warned   it can be trained on, and is often a mistake: a message says so
    same     it is the good data in another form: the very same prompts and labels are read
    valid    of random changes: the rows that it has now are rows like others, or it is refused

The three ways to read data must agree: what the plan and the check let pass, a run reads without an error; what they
refuse, a run refuses too. Nothing raises anything but `ValueError`, and nothing takes more than LIMIT_S seconds.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.data.check_command import DataCheck
from fusionrl.data.prompts import PromptColumns, check_file, load_conversations, load_prompts, template_probe
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.tokenizer_files import read_tokenizer_files

LIMIT_S = 5.0
NUM_RANDOM = 12
MODES = ("text", "chat", "strict", "sft")
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate between user and assistant') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}{{ '<|assistant|>' }}"
)
Row = dict[str, Any]
Write = Callable[[Path], str]  # writes below a folder, and returns what --prompt-data would name


@dataclass(frozen=True)
class Mutation:
    """One way to spoil data. `says` must be part of the first message; `mode` is how the rows are read."""

    kind: str
    name: str
    write: Write
    expect: str
    says: str = ""
    mode: str = "text"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutation: the verdict, the messages, seconds of the slowest way to read it, faults."""

    verdict: str
    messages: list[str]
    seconds: float
    faults: list[str]


# ------------------------------------------------------------------------------------------------ good data
def good_rows(mode: str) -> list[Row]:
    """Four rows of each form."""
    sums = [(1, 2), (3, 4), (5, 6), (7, 8)]
    rows: list[Row] = []
    for a, b in sums:
        prompt: Any = f"{a}+{b}="
        if mode in ("chat", "strict"):
            prompt = [{"role": "user", "content": prompt}]
        elif mode == "sft":
            prompt = [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(a + b)}]
        rows.append({"prompt": prompt, "label": str(a + b), "metadata": {"level": 1}, "tools": None})
    return rows


def jsonl(rows: Sequence[Row | str]) -> str:
    """A row that is a text stands as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def bytes_file(name: str, content: bytes | str) -> Write:
    """Writes one file."""

    def write(folder: Path) -> str:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# ------------------------------------------------------------------------------------------------ values of one row
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_BY_100 = "[" * 100 + "]" * 100
TEXT, MESSAGES = "neither text nor a list of messages", "neither text nor a list of messages"
_ANY = ('"NUL\\u0000"', "the character NUL"), ('"\\ud800 alone"', "half a character"), ('"\\udc00"', "half a character")
PROMPTS: list[tuple[str, str, str, str]] = [  # name, JSON text of the value, what becomes of it, part of the message
    *((f"prompt {text[:20]}", text, "refused", TEXT) for text in ("null", "7", "1.5", "true", "{}", '["1+2="]', "[1]")),
    *((f"prompt {text}", text, "refused", "is empty") for text in ('""', '"   "', '"\\n\\t"', '"\\u3000"')),
    *((f"prompt {text}", text, "refused", says) for text, says in _ANY),
    ("prompt with halves of a character in the wrong order", '"\\ude00\\ud83d"', "refused", "half a character"),
    ("prompt as an object", '{"text": "1+2="}', "refused", TEXT),
    ("prompt 100 lists deep", DEEP_BY_100, "refused", TEXT),
    ("prompt 100,000 lists deep", DEEP, "refused", "nested too deeply"),
    ("prompt of 2,000,000 characters", json.dumps("1+" * 1_000_000), "refused", "more than 1,000,000 characters"),
    ("prompt of 20,000,000 characters", json.dumps("1+2 " * 5_000_000), "refused", "more than 1,000,000 characters"),
    ("prompt NaN", "NaN", "refused", TEXT),
]
LABELS: list[tuple[str, str, str, str]] = [
    ("label null", "null", "warned", "is null"),
    *((f"label {text}", text, "refused", "not finite") for text in ("NaN", "Infinity", "-Infinity", "1e999")),
    *((f"label {text}", text, "refused", says) for text, says in _ANY),
    ("label with NaN in a list", "[1, NaN]", "refused", "not finite"),
    ("label with half a character in a key", '{"\\ud800": 1}', "refused", "half a character"),
    ("label 100 lists deep", DEEP_BY_100, "refused", "more than 64 deep"),
    ("label 900 objects deep", '{"a":' * 900 + "1" + "}" * 900, "refused", "64 deep"),
    ("label 100,000 lists deep", DEEP, "refused", "nested too deeply"),
    ("label of 5,000 digits", "9" * 5000, "refused", "too many digits"),
    ("label with a key twice", '{"a": 1, "a": 2}', "refused", "stands twice"),
]
METADATA: list[tuple[str, str, str, str]] = [
    *(
        (f"metadata {text}", text, "refused", "not a JSON object")
        for text in ("[1]", "7", "true", '"[1]"', '"3"', '"1.5"')
    ),
    ("metadata as text that is no JSON", '"{level: 1}"', "refused", "not valid JSON"),
    ("metadata as text, cut off", '"{\\"level\\": "', "refused", "not valid JSON"),
    ("metadata as text, 100,000 lists deep", json.dumps(DEEP), "refused", "nested too deeply"),
    ("metadata as text, a key twice", json.dumps('{"a": 1, "a": 2}'), "refused", "stands twice"),
    ("metadata as text with NUL", json.dumps('{"a": "\\u0000"}'), "refused", "the character NUL"),
    ("metadata as text with NaN", json.dumps('{"a": NaN}'), "warned", "not finite"),
    ("metadata with NaN", '{"a": NaN}', "warned", "not finite"),
    ("metadata with infinity by its exponent", '{"a": [1e400]}', "warned", "not finite"),
    ("metadata with half a character", '{"a": "\\udfff"}', "refused", "half a character"),
    ("metadata with NUL in a key", '{"\\u0000": 1}', "refused", "the character NUL"),
    ("metadata 100 lists deep", '{"a": ' + DEEP_BY_100 + "}", "refused", "64 deep"),
    ("metadata 100,000 objects deep", '{"a":' * 100_000 + "1" + "}" * 100_000, "refused", "nested too deeply"),
    ("metadata with a key twice", '{"a": 1, "a": 1}', "refused", "stands twice"),
    ("metadata with a number of 5,000 digits", '{"a": ' + "1" * 5000 + "}", "refused", "too many digits"),
    ("metadata null", "null", "same", ""),
    ("metadata as empty text", '""', "same", ""),
]
TOOLS: list[tuple[str, str, str, str]] = [
    *(
        (f"tools {text}", text, "refused", "not a list of tools")
        for text in ("{}", "7", '["calc"]', "[1]", '"{}"', "[[]]")
    ),
    ("tools as text that is no JSON", '"calc("', "refused", "not valid JSON"),
    ("tools with NaN", '[{"name": "calc", "limit": NaN}]', "refused", "not finite"),
    ("tools with half a character", '[{"name": "\\ud800"}]', "refused", "half a character"),
    ("tools 100 lists deep", '[{"name": ' + DEEP_BY_100 + "}]", "refused", "64 deep"),
    ("tools as empty text", '""', "same", ""),
]
USER = {"role": "user", "content": "1+2="}


def _message(**changes: Any) -> str:
    return json.dumps([{**USER, **changes}])


def _part(part: Any) -> str:
    return json.dumps([{"role": "user", "content": [part]}])


CHATS: list[tuple[str, str, str, str]] = [
    ("no message", "[]", "refused", "is empty"),
    *(
        (f"messages {text}", text, "refused", MESSAGES)
        for text in ("[null]", '["1+2="]', "[[]]", "[3]", "{}", "7", "null")
    ),
    ("a list of a list of messages", json.dumps([[USER]]), "refused", MESSAGES),
    ("a message without a role", '[{"content": "1+2="}]', "refused", MESSAGES),
    *((f"role {role!r}", _message(role=role), "refused", MESSAGES) for role in (None, 3, ["user"], {"name": "user"})),
    *(
        (f"role {role!r}", _message(role=role), "refused", "is not one word")
        for role in ("", "the user", "user\n", "\tuser", "user\x00", "u" * 200)
    ),
    ("role with a special token", _message(role="user<|end|>"), "refused", "holds a special token"),
    ("role with half a character", '[{"role": "\\ud800", "content": "x"}]', "refused", "is not one word"),
    *((f"role {role!r}", _message(role=role), "warned", "is unusual") for role in ("human", "User", "bot")),
    *((f"content {text!r}", _message(content=text), "refused", MESSAGES) for text in (3, 1.5, True, {"text": "1+2="})),
    ("content null", _message(content=None), "refused", "has no content"),
    ("no content", '[{"role": "user"}]', "refused", "has no content"),
    ("content empty everywhere", _message(content=""), "refused", "is empty"),
    ("content of spaces", _message(content="  "), "refused", "is empty"),
    ("content with NUL", _message(content="1+\x002="), "refused", "the character NUL"),
    ("content with half a character", '[{"role": "user", "content": "\\ud800"}]', "refused", "half a character"),
    ("content of 2,000,000 characters", _message(content="1+" * 1_000_000), "refused", "1,000,000 characters"),
    ("content with a special token", _message(content="1+2=<|end|>"), "warned", "holds a special token"),
    ("content with the header of a turn", _message(content="<|assistant|>3"), "warned", "holds a special token"),
    ("a part that is text", _part("1+2="), "refused", "a part of a message's content"),
    ("a part that is null", _part(None), "refused", "a part of a message's content"),
    ("a part without a type", _part({"text": "1+2="}), "refused", "a part of a message's content"),
    ("a part of text without its text", _part({"type": "text"}), "refused", "a part of a message's content"),
    ("a part whose text is a number", _part({"type": "text", "text": 3}), "refused", "a part of a message's content"),
    ("parts that the template cannot write", _part({"type": "video", "video": "1+2="}), "refused", "chat template"),
    ("content 100 lists deep", f'[{{"role": "user", "content": {DEEP_BY_100}}}]', "refused", "64 deep"),
    ("content 100,000 lists deep", f'[{{"role": "user", "content": {DEEP}}}]', "refused", "nested too deeply"),
    ("content twice in a message", '[{"role": "user", "content": "1", "content": "2"}]', "refused", "stands twice"),
    (
        "a message with an odd name",
        '[{"role": "user", "content": "1", "name": "\\ud800"}]',
        "refused",
        "half a character",
    ),
    ("tool_calls as text", _message(tool_calls="calc"), "refused", "tool_calls"),
    ("tool_calls as texts", _message(tool_calls=["calc"]), "refused", "tool_calls"),
    ("tool_calls without a name", _message(tool_calls=[{"function": {}}]), "refused", "tool_calls"),
    ("tool_calls whose function is text", _message(tool_calls=[{"function": "calc"}]), "refused", "tool_calls"),
    (
        "the assistant has the last word",
        json.dumps([USER, {"role": "assistant", "content": "3"}]),
        "warned",
        "ends with the assistant's turn",
    ),
]
STRICT: list[tuple[str, str, str, str]] = [
    ("two users in a row", json.dumps([USER, USER]), "refused", "roles must alternate"),
    ("a system message", json.dumps([{"role": "system", "content": "Add."}, USER]), "refused", "roles must alternate"),
    (
        "the assistant begins",
        json.dumps([{"role": "assistant", "content": "3"}, USER]),
        "refused",
        "roles must alternate",
    ),
]
SFT: list[tuple[str, str, str, str]] = [
    ("no turn of the assistant", json.dumps([USER]), "refused", "without an assistant turn"),
    *(
        (
            f"step_loss_mask {mask!r}",
            json.dumps([USER, {"role": "assistant", "content": "3", "step_loss_mask": mask}]),
            "refused",
            "step_loss_mask",
        )
        for mask in (2, "0", 0, [1])
    ),
    (
        "the end marker inside an answer",
        json.dumps([USER, {"role": "assistant", "content": "3<|end|>4"}]),
        "warned",
        "special",
    ),
    (
        "a header inside an answer",
        json.dumps([USER, {"role": "assistant", "content": "<|user|>"}]),
        "warned",
        "special",
    ),
    (
        "an answer with NUL",
        json.dumps([USER, {"role": "assistant", "content": "\x00"}]),
        "refused",
        "the character NUL",
    ),
    ("a text instead of a conversation", '"1+2="', "valid", ""),
]


def _row(mode: str, key: str, value: str) -> str:
    """JSON text of a good row with another value of one column."""
    fields = [
        f"{json.dumps(name)}: {value if name == key else json.dumps(item)}" for name, item in good_rows(mode)[1].items()
    ]
    return "{" + ", ".join(fields) + "}"


def row_mutations() -> Iterator[Mutation]:
    """One bad row between good ones, as a line of .jsonl and as an element of an array in .json."""
    tables = (
        ("prompts", "prompt", "text", PROMPTS),
        ("labels", "label", "text", LABELS),
        ("metadata", "metadata", "text", METADATA),
        ("tools", "tools", "chat", TOOLS),
        ("messages", "prompt", "chat", CHATS),
        ("messages that a template refuses", "prompt", "strict", STRICT),
        ("conversations of --mode sft", "prompt", "sft", SFT),
    )
    for kind, key, mode, table in tables:
        good = [json.dumps(row) for row in good_rows(mode)]
        for name, value, expect, says in table:
            line = _row(mode, key, value)
            content = jsonl([good[0], line, *good[2:]])
            yield Mutation(kind, name, bytes_file("data.jsonl", content), expect, says, mode)
            # A megabyte in an array is the same as in a line.
            if len(line) < 100_000:
                array = "[" + ",\n".join([good[0], line, *good[2:]]) + "]"
                yield Mutation(kind, f"{name}, in an array", bytes_file("data.json", array), expect, says, mode)
    missing = "column 'prompt' is missing"
    for kind, name, line, says in (
        ("columns", "no prompt", '{"label": "3"}', missing),
        ("columns", "no label", '{"prompt": "1+2="}', "column 'label' is missing"),
        ("columns", "an empty object", "{}", missing),
        ("columns", "Prompt with a capital", '{"Prompt": "1+2=", "label": "3"}', "--input-key Prompt?"),
        ("columns", "a space behind the name", '{"prompt ": "1+2=", "label": "3"}', missing),
        ("columns", "question and answer", '{"question": "1+2=", "answer": "3"}', "--input-key question?"),
        ("columns", "a misspelt name", '{"promt": "1+2=", "label": "3"}', "--input-key promt?"),
        ("columns", "names that cannot be printed", '{"\\ud800\\u0000": "1+2=", "label": "3"}', missing),
        ("columns", "the prompt twice", '{"prompt": "1", "prompt": "2", "label": "3"}', "stands twice"),
        ("columns", "the label twice", '{"prompt": "1", "label": "2", "label": "3"}', "stands twice"),
    ):
        rows = [json.dumps(row) for row in good_rows("text")]
        yield Mutation(kind, name, bytes_file("data.jsonl", jsonl([rows[0], line, *rows[2:]])), "refused", says)
        yield Mutation(kind, f"{name}, in all rows", bytes_file("data.jsonl", jsonl([line] * 500)), "refused", says)


# ------------------------------------------------------------------------------------------------ files of text
def text_mutations() -> Iterator[Mutation]:
    """Encodings, line ends, and what is not JSON."""
    text = jsonl(good_rows("text"))
    plain, lines = text.encode(), text.splitlines()

    def one(name: str, content: bytes | str, expect: str, says: str = "", file: str = "data.jsonl") -> Mutation:
        return Mutation(kind, name, bytes_file(file, content), expect, says)

    kind = "encodings and line ends"
    accents = plain.replace(b"1+2=", "1+2=é".encode("latin-1"))
    yield one("byte order mark", b"\xef\xbb\xbf" + plain, "same")
    yield one(
        "byte order mark before each line", b"".join(b"\xef\xbb\xbf" + row for row in plain.splitlines(True)), "same"
    )
    yield one("byte order mark alone", b"\xef\xbb\xbf", "refused")
    yield one("carriage returns", plain.replace(b"\n", b"\r\n"), "same")
    yield one("carriage returns alone", plain.replace(b"\n", b"\r"), "refused", "Extra data")
    yield one("blank lines", plain.replace(b"\n", b"\n\n \t\n"), "same")
    yield one("no line break at the end", plain.rstrip(), "same")
    yield one("white space around rows", "".join(f"  {line}\t \n" for line in lines), "same")
    yield one("escapes for plain letters", text.replace("=", "\\u003d"), "same")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
        yield one(encoding.upper(), text.encode(encoding), "refused", "UTF" if encoding in ("utf-16", "utf-32") else "")
    yield one("Latin-1", accents, "refused", "utf-8")
    yield one("a byte of UTF-8 is missing", plain.replace(b"1+2=", "1+2=€".encode()[:-1]), "refused", "utf-8")
    yield one("a half of a character in UTF-8", plain.replace(b"1+2=", b"1+2=\xed\xa0\x80"), "refused", "utf-8")
    yield one("NUL in two bytes", plain.replace(b"1+2=", b"1+2=\xc0\x80"), "refused", "utf-8")
    yield one("NUL behind the end", plain + b"\0" * 100, "refused", "line 5")
    yield one("NUL inside a text", plain.replace(b"1+2=", b"1+\0" + b"2="), "refused", "Invalid control character")
    yield one("a line break inside a text", text.replace("1+2=", "1+\n2="), "refused", "line 1")
    yield one("a tab inside a text", text.replace("1+2=", "1+\t2="), "refused", "Invalid control character")
    yield one("no bytes", b"", "refused", "no rows")
    yield one("spaces alone", b" \n\t\n", "refused", "no rows")

    kind = "other formats under the name .jsonl"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data.jsonl", text)
    yield one("gzip", gzip.compress(plain, mtime=0), "refused", "gzip")
    yield one("zip", packed.getvalue(), "refused", "zip")
    yield one("zstd", b"\x28\xb5\x2f\xfd" + bytes(range(60)), "refused", "zstd")
    yield one("parquet", b"PAR1" + bytes(200) + b"PAR1", "refused", "parquet")
    yield one("Arrow", b"ARROW1" + bytes(200), "refused", "Arrow")
    yield one("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "refused")
    yield one("CSV", "prompt,label\n1+2=,3\n", "refused", "not valid JSON in 2 of 2 rows")
    yield one("YAML", "- prompt: 1+2=\n  label: 3\n", "refused", "not valid JSON")
    yield one("XML", "<rows><row>1+2=</row></rows>\n", "refused", "not valid JSON")
    yield one(
        "Python's way to write it", "".join(f"{row!r}\n" for row in good_rows("text")), "refused", "not valid JSON"
    )
    yield one("an array on one line", json.dumps(good_rows("text")), "refused", "no JSON object")
    yield one("rows as arrays", '["1+2=", "3"]\n' * 4, "refused", "no JSON object in 4 of 4 rows (lines 1, 2, 3, …)")
    yield one("rows over several lines", "\n".join(json.dumps(row, indent=1) for row in good_rows("text")), "refused")

    kind = "broken JSON"
    for name, line in (
        ("two objects on a line", lines[1] + lines[2]),
        ("a comma behind the row", lines[1] + ","),
        ("a comma behind the last value", lines[1][:-1] + ",}"),
        ("a comment", lines[1] + " // easy"),
        ("a comment line", "# easy"),
        ("keys without quotes", '{prompt: "1+2=", label: "3"}'),
        ("single quotes", lines[1].replace('"', "'")),
        ("a quote is missing", lines[1].replace('"label"', 'label"')),
        ("a brace is missing", lines[1][:-1]),
        ("a colon is missing", lines[1].replace(":", " ", 1)),
        ("None", lines[1].replace("null", "None")),
        ("a number with a leading zero", lines[1].replace('{"level": 1}', '{"level": 01}')),
        ("a number with a plus sign", lines[1].replace('{"level": 1}', '{"level": +1}')),
        ("a hexadecimal number", lines[1].replace('{"level": 1}', '{"level": 0x1}')),
        ("an escape that is none", lines[1].replace("3+4", "\\x33+4")),
        ("an escape of two digits", lines[1].replace("3+4", "\\u33")),
        ("a number alone", "3"),
        ("a text alone", '"1+2="'),
        ("null alone", "null"),
        ("NaN alone", "NaN"),
        ("100,000 brackets that open", "[" * 100_000),
        ("100,000 objects that open", '{"a":' * 100_000),
    ):
        yield one(name, "\n".join([lines[0], line, *lines[2:]]), "refused", "line 2: ")
    yield one("a line of 65 MiB", b'{"prompt": "' + b"1" * (65 << 20) + b'"}\n', "refused", "more than 64 MiB")
    for position in (1, len(lines[3]) // 3, len(lines[3]) // 2, len(lines[3]) - 1):
        yield one(
            f"the last line ends after {position} characters",
            text[: len(text) - 1 - len(lines[3]) + position],
            "refused",
            "line 4",
        )

    kind = "files of .json"
    array = json.dumps(good_rows("text"))

    def whole(name: str, content: bytes | str, expect: str, says: str = "") -> Mutation:
        return one(name, content, expect, says, "data.json")

    yield whole("an array", array, "same")
    yield whole("an array with line breaks", json.dumps(good_rows("text"), indent=2), "same")
    yield whole("an array behind a byte order mark and spaces", b"\xef\xbb\xbf \n" + array.encode(), "same")
    yield whole("lines", text, "same")
    yield whole("an empty array", "[]", "refused", "no rows")
    yield whole("an array of numbers", "[1, 2]", "refused", "no JSON object in 2 of 2 rows (rows 1, 2)")
    yield whole("an array of arrays", f"[{array}]", "refused", "row 1: no JSON object")
    yield whole("a null between rows", array.replace("}, {", "}, null, {", 1), "refused", "row 2: no JSON object")
    yield whole("a comma behind the last row", array[:-1] + ",]", "refused", "row 5")
    yield whole("a comma is missing", array.replace("}, {", "} {", 1), "refused", "row 1")
    yield whole("two commas", array.replace("}, {", "},, {", 1), "refused", "row 2")
    yield whole("no bracket at the end", array[:-1], "refused", "row 4")
    yield whole("something behind the end", array + "x", "refused", "Extra data")
    yield whole("two arrays", array + array, "refused", "Extra data")
    yield whole("the array cut in half", array[: len(array) // 2], "refused", "not a valid JSON array")
    yield whole(
        "one object around the rows", json.dumps({"data": good_rows("text")}, indent=1), "refused", "one JSON object"
    )
    yield whole("UTF-16", array.encode("utf-16"), "refused")
    yield whole("100,000 brackets", DEEP, "refused", "nested too deeply")
    yield whole("no bytes", "", "refused", "no rows")


# ------------------------------------------------------------------------------------------------ paths
def path_mutations() -> Iterator[Mutation]:
    """Paths that do not name a regular file."""
    kind, text = "paths", jsonl(good_rows("text"))

    def spec(suffix: str) -> Write:
        return lambda folder: bytes_file("data.jsonl", text)(folder) + suffix

    def other(make: Callable[[Path], None]) -> Write:
        def write(folder: Path) -> str:
            path = folder / "data.jsonl"
            make(path)
            return str(path)

        return write

    yield Mutation(kind, "no file", lambda folder: str(folder / "none.jsonl"), "refused", "no such file")
    yield Mutation(kind, "an empty folder", lambda folder: str(folder), "refused", "not a folder that datasets")
    yield Mutation(kind, "a folder with the name of a file", other(Path.mkdir), "refused", "not a folder that datasets")
    yield Mutation(kind, "a pipe", other(lambda path: os.mkfifo(path)), "refused", "no such file")
    yield Mutation(kind, "a link to itself", other(lambda path: path.symlink_to(path)), "refused")
    yield Mutation(kind, "a link to nowhere", other(lambda path: path.symlink_to("none")), "refused", "no such file")
    yield Mutation(kind, "a device", lambda folder: "/dev/zero", "refused", "no such file")
    for name in ("data.csv", "data.txt", "data", "data.jsonl.gz", "data.JSONL"):
        yield Mutation(kind, f"the name {name}", bytes_file(name, text), "refused", "unknown suffix")
    yield Mutation(kind, "all rows by a slice", spec("@[0:4]"), "same")
    yield Mutation(kind, "a slice behind the end", spec("@[10:]"), "refused", "no rows")
    yield Mutation(kind, "a slice that is empty", spec("@[2:2]"), "refused", "no rows")
    for suffix in ("@[1]", "@[1:2:3]", "@[a:b]", "@[1:"):
        yield Mutation(kind, f"the slice {suffix}", spec(suffix), "refused", "a slice of the rows is written")
    yield Mutation(kind, "a split of a file", spec(":train"), "refused", "no such file")


# ------------------------------------------------------------------------------------------------ tables
def table_mutations() -> Iterator[Mutation]:
    """Parquet files and folders of Arrow files; none where pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return

    def parquet(table: Any, **options: Any) -> bytes:
        out = io.BytesIO()
        pq.write_table(table, out, **options)
        return out.getvalue()

    def columns(**changes: Any) -> Any:
        rows = good_rows("text")
        values = {"prompt": [row["prompt"] for row in rows], "label": [row["label"] for row in rows]} | changes
        return pa.table({name: column for name, column in values.items() if column is not None})

    kind = "parquet"
    good, prompts, labels = parquet(columns()), columns()["prompt"], columns()["label"]

    def one(name: str, table: Any, expect: str, says: str = "", mode: str = "text") -> Mutation:
        content = table if isinstance(table, bytes) else parquet(table)
        return Mutation(kind, name, bytes_file("data.parquet", content), expect, says, mode)

    yield one("the good rows", good, "same")
    for codec in ("gzip", "zstd", "none"):
        yield one(f"compressed by {codec}", parquet(columns(), compression=codec), "same")
    yield one("a dictionary of texts", columns(prompt=prompts.dictionary_encode()), "same")
    yield one("large texts", columns(prompt=prompts.cast(pa.large_string())), "same")
    yield one("another column", pa.table({"question": prompts, "label": labels}), "refused", "--input-key question?")
    yield one("no label", columns(label=None), "refused", "column 'label' is missing")
    twice = pa.Table.from_arrays([prompts, prompts, labels], names=["prompt", "prompt", "label"])
    yield one("a column twice", twice, "refused", "several columns have the name 'prompt'")
    yield one("no rows", columns().slice(0, 0), "refused", "no rows")
    yield one("prompts as numbers", columns(prompt=[1, 2, 3, 4]), "refused", TEXT)
    yield one("prompts as bytes", columns(prompt=prompts.cast(pa.binary())), "refused", TEXT)
    yield one("a prompt is null", columns(prompt=["1+2=", None, "5+6=", "7+8="]), "refused", "row 2")
    yield one("a prompt is empty", columns(prompt=["1+2=", "", "5+6=", "7+8="]), "refused", "row 2")
    yield one("a prompt with NUL", columns(prompt=["1+2=", "\0", "5+6=", "7+8="]), "refused", "the character NUL")
    yield one("prompts as lists of texts", columns(prompt=[["1+2="]] * 4), "refused", TEXT)
    yield one("a label is null", columns(label=["3", None, "11", "15"]), "warned", "is null")
    yield one("labels as numbers", columns(label=[3, 7, 11, 15]), "valid")
    yield one("a label is NaN", columns(label=[3.0, float("nan"), 11.0, 15.0]), "refused", "not finite")
    yield one("a label is infinite", columns(label=[3.0, float("inf"), 11.0, 15.0]), "refused", "not finite")
    seconds = pa.array([1, 2, 3, 4], pa.timestamp("s"))
    yield one("labels as times", columns(label=seconds), "refused", "of the kind datetime")
    yield one("labels as bytes", columns(label=labels.cast(pa.binary())), "refused", "of the kind bytes")
    decimal = pa.array([3, 7, 11, 15]).cast(pa.decimal128(21, 2))
    yield one("labels as decimals", columns(label=decimal), "refused", "of the kind Decimal")
    yield one(
        "times in the metadata",
        columns(metadata=[{"at": None}] * 4).set_column(2, "metadata", pa.StructArray.from_arrays([seconds], ["at"])),
        "refused",
        "of the kind datetime",
    )
    yield one("metadata as a list", columns(metadata=[[1]] * 4), "refused", "not a JSON object")
    pairs = pa.array([[("level", 1)]] * 4, pa.map_(pa.string(), pa.int64()))
    yield one("metadata as a map", columns(metadata=pairs), "refused", "not a JSON object")
    yield one("metadata as text", columns(metadata=['{"level": 1}'] * 4), "same")
    yield one("metadata as broken text", columns(metadata=['{"level": 1}', "{", "{}", "{}"]), "refused", "row 2")
    chats = [row["prompt"] for row in good_rows("chat")]
    yield one("messages", columns(prompt=chats), "same", mode="chat")
    named = [[{**message, "name": None} for message in chat] for chat in chats]
    yield one("messages with names of null", columns(prompt=named), "same", mode="chat")
    yield one("messages of null", columns(prompt=[chats[0], None, *chats[2:]]), "refused", MESSAGES, mode="chat")
    yield one("a message of null", columns(prompt=[chats[0], [None], *chats[2:]]), "refused", MESSAGES, mode="chat")
    yield one("no bytes", b"", "refused", "not a readable parquet file")
    yield one("the first bytes alone", good[:4], "refused", "not a readable parquet file")
    yield one("no end", good[:-8], "refused", "not a readable parquet file")
    yield one("no start", good[8:], "refused")
    yield one("cut in half", good[: len(good) // 2], "refused", "not a readable parquet file")
    yield one("text", jsonl(good_rows("text")).encode(), "refused", "not a readable parquet file")
    yield one("a footer of 4 GiB", good[:-8] + b"\xff\xff\xff\xff" + good[-4:], "refused")
    yield from _folder_mutations(columns())


def _folder_mutations(table: Any) -> Iterator[Mutation]:
    import pyarrow as pa

    def stream() -> bytes:
        out = io.BytesIO()
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        return out.getvalue()

    arrow = stream()
    state = json.dumps({"_data_files": [{"filename": "data.arrow"}]})

    def folder_of(files: dict[str, bytes | str], suffix: str = "") -> Write:
        def write(folder: Path) -> str:
            for name, content in files.items():
                path = folder / "set" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            return str(folder / "set") + suffix

        return write

    def one(name: str, files: dict[str, bytes | str], expect: str, says: str = "", suffix: str = "") -> Mutation:
        return Mutation("folders of datasets", name, folder_of(files, suffix), expect, says)

    good: dict[str, bytes | str] = {"state.json": state, "data.arrow": arrow}
    splits = {f"{name}/{file}": content for name in ("train", "test") for file, content in good.items()}
    listed = json.dumps({"splits": ["train", "test"]})
    yield one("the good rows", good, "same")
    yield one("a split", {"dataset_dict.json": listed} | splits, "same", suffix=":train")
    yield one("no split is named", {"dataset_dict.json": listed} | splits, "refused", "choose one of its splits")
    yield one("a split that is not there", {"dataset_dict.json": listed} | splits, "refused", "choose one", ":dev")
    yield one("a split of a folder without", good, "refused", "it has no splits", ":train")
    yield one("a split without its folder", {"dataset_dict.json": listed}, "refused", "no state.json", ":train")
    for name, text in (
        ("broken", "{"),
        ("empty", ""),
        ("a list", "[]"),
        ("100,000 lists deep", DEEP),
        ("without splits", "{}"),
        ("with a number for splits", '{"splits": 3}'),
    ):
        yield one(f"dataset_dict.json is {name}", {"dataset_dict.json": text} | splits, "refused", suffix=":train")
    for name, text in (
        ("broken", "{"),
        ("a list", "[]"),
        ("100,000 lists deep", DEEP),
        ("without files", "{}"),
        ("with a text for files", '{"_data_files": "data.arrow"}'),
        ("with files without names", '{"_data_files": [{}]}'),
        ("naming a file elsewhere", '{"_data_files": [{"filename": "../set/data.arrow"}]}'),
        ("naming a file from the root", '{"_data_files": [{"filename": "/dev/zero"}]}'),
        ("naming a file that is not there", '{"_data_files": [{"filename": "other.arrow"}]}'),
    ):
        yield one(f"state.json is {name}", {"state.json": text, "data.arrow": arrow}, "refused")
    yield one("the Arrow file is empty", {"state.json": state, "data.arrow": b""}, "refused")
    yield one("the Arrow file is text", {"state.json": state, "data.arrow": "rows"}, "refused")
    for share in (4, 2):
        cut = arrow[: len(arrow) // share]
        yield one(f"1/{share} of the Arrow file", {"state.json": state, "data.arrow": cut}, "refused")


# ------------------------------------------------------------------------------------------------ random changes
def random_mutations(seed: int) -> Iterator[Mutation]:
    """Bytes that were changed, cut out or doubled at random places."""
    sources = {"data.jsonl": jsonl(good_rows("text")).encode(), "data.json": json.dumps(good_rows("text")).encode()}
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        out = io.BytesIO()
        pq.write_table(
            pa.Table.from_pylist([{"prompt": r["prompt"], "label": r["label"]} for r in good_rows("text")]), out
        )
        sources["data.parquet"] = out.getvalue()
    except ImportError:
        pass
    for file, good in sources.items():
        for way in ("changed", "cut out", "doubled"):
            for number in range(NUM_RANDOM):
                draw = random.Random(f"{seed} {file} {way} {number}")
                start = draw.randrange(len(good) - 1)
                stop = min(len(good), start + draw.choice((1, 1, 2, 8, 64)))
                if way == "changed":
                    middle = bytes(draw.randrange(256) for _ in range(stop - start))
                else:
                    middle = b"" if way == "cut out" else good[start:stop] * 2
                content = good[:start] + middle + good[stop:]
                name = f"bytes {start} to {stop} of {file} {way}"
                yield Mutation(f"random bytes of {file[4:]}", name, bytes_file(file, content), "valid")


def catalogue(seed: int = 0) -> list[Mutation]:
    """All mutations, in the order of the table."""
    return [*row_mutations(), *text_mutations(), *path_mutations(), *table_mutations(), *random_mutations(seed)]


# ------------------------------------------------------------------------------------------------ judging
class Judge:
    """Reads what mutations wrote in the three ways that data is read. `folder` gets the models' tokenizers."""

    def __init__(self, folder: Path) -> None:
        from tools.make_quickstart import build_tokenizer

        self._tokenizers, self._files = {}, {}
        for name in ("plain", "strict"):
            tokenizer = build_tokenizer()
            if name == "strict":
                tokenizer.chat_template = STRICT_TEMPLATE
            tokenizer.save_pretrained(folder / name)
            self._tokenizers[name], self._files[name] = tokenizer, read_tokenizer_files(folder / name)

    def judge(self, mutation: Mutation, folder: Path) -> Outcome:
        """Write the mutation below `folder`, an empty one, and read it."""
        spec, mode = mutation.write(folder), mutation.mode
        columns = PromptColumns("prompt", "label", tool_key="tools", apply_chat_template=mode in ("chat", "strict"))
        name, is_sft = "strict" if mode == "strict" else "plain", mode == "sft"
        tokenizer, files = self._tokenizers[name], self._files[name]
        probe = template_probe(files, columns, lambda: tokenizer, "auto" if is_sft else None)

        def plan() -> tuple[list[str], list[str]]:
            checker = RowChecker(columns, is_sft=is_sft, special_tokens=files.special_tokens, probe=probe)
            check = check_file(spec, "--prompt-data", checker)
            return check.errors, check.warnings

        def command() -> tuple[list[str], list[str]]:
            return DataCheck(columns, tokenizer, is_sft).problems(spec)

        def run() -> tuple[list[str], list[str]]:
            try:
                loaded = load_conversations(spec, columns) if is_sft else load_prompts(spec, tokenizer, columns)
            except ValueError as error:
                return [str(error)], []
            samples.extend(loaded.samples)
            return [], []

        samples: list[Any] = []
        faults, seconds, errors, warnings = [], 0.0, {}, {}
        for way in (plan, command, run):
            start = time.perf_counter()
            try:
                errors[way.__name__], warnings[way.__name__] = way()
            except Exception as error:  # any exception is what this program looks for
                faults.append(f"{way.__name__} raised {type(error).__name__}: {error}")
                errors[way.__name__] = warnings[way.__name__] = []
            seconds = max(seconds, time.perf_counter() - start)
        verdict = self._verdict(errors["plan"], warnings["plan"], samples, mode)
        faults += self._faults(mutation, verdict, errors, warnings)
        if seconds > LIMIT_S:
            faults.append(f"it took {seconds:.1f} s")
        return Outcome(verdict, errors["plan"] + warnings["plan"], seconds, faults)

    def _verdict(self, errors: list[str], warnings: list[str], samples: list[Any], mode: str) -> str:
        if errors:
            return "refused"
        if warnings:
            return "warned"
        expected = [(row["prompt"], row["label"]) for row in good_rows(mode)]
        read = [
            (sample.prompt if mode in ("text", "sft") else _bare(sample.messages), sample.label) for sample in samples
        ]
        return "same" if read == expected else "valid"

    def _faults(
        self, mutation: Mutation, verdict: str, errors: dict[str, list[str]], warnings: dict[str, list[str]]
    ) -> list[str]:
        faults = []
        expect, messages = mutation.expect, errors["plan"] + warnings["plan"]
        if verdict != expect and expect != "valid":
            faults.append(f"{verdict}, and not {expect}: {messages}")
        if mutation.says and not any(mutation.says in text for text in messages):
            faults.append(f"no message has {mutation.says!r}: {messages}")
        # --mode sft makes its loss masks when rows are drawn, which reading them does not.
        ways = ("plan", "command") if mutation.mode == "sft" else ("plan", "command", "run")
        if len({bool(errors[way]) for way in ways}) > 1 and not _is_double(errors["command"]):
            faults.append(f"plan, check and run do not agree: {errors}")
        if len(messages) > 4 or any("\n" in text or len(text) > 1000 for text in messages):
            faults.append(f"it takes more than a line a cause: {messages}")
        return faults


def _bare(messages: list[Row]) -> list[Row]:
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_double(errors: list[str]) -> bool:
    """Only the check looks for a prompt that stands twice, which random changes can make of two."""
    return len(errors) == 1 and "the same prompt as an earlier row" in errors[0]


def run_all(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Judge them one after the other, each in a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        judge = Judge(Path(scratch, "models"))
        for number, mutation in enumerate(mutations):
            folder = Path(scratch, str(number))
            folder.mkdir()
            yield mutation, judge.judge(mutation, folder)
