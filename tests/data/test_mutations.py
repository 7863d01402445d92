"""Spoil good prompt data in hundreds of ways, and see what the plan, `fusionrl data check` and a run say to each.

Each mutation is a file or a folder of a few rows, and says what must become of it:

    refused  not one row is trained on; the message names the place and the cause
    warned   it can be trained on, and is often a mistake: a message says so
    same     it is the good data in another form: the very same prompts and labels are read
    valid    of random changes: the rows that it has now are rows like others, or it is refused

The three ways to read data must agree on what is refused. Nothing raises anything but `ValueError`, and nothing takes
more than LIMIT_S seconds.
"""

import gzip
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusionrl.checks.data import DataCheck
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import check_file, load_conversations, load_prompts, template_probe
from fusionrl.data.row_checks import RowChecker
from fusionrl.data.tokenizer import read_tokenizer_files
from tools.make_quickstart import build_tokenizer

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
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


class Mutation(NamedTuple):
    """One way to spoil data. `says` must be part of a message; `mode` is how the rows are read."""

    name: str
    write: Write
    expect: str
    says: str = ""
    mode: str = "text"


def good_rows(mode: str) -> list[Row]:
    """Four rows of each form."""
    rows: list[Row] = []
    for a, b in [(1, 2), (3, 4), (5, 6), (7, 8)]:
        prompt: Any = f"{a}+{b}="
        if mode != "text":
            prompt = [{"role": "user", "content": prompt}]
        if mode == "sft":
            prompt.append({"role": "assistant", "content": str(a + b)})
        rows.append({"prompt": prompt, "label": str(a + b), "metadata": {"level": 1}, "tools": None})
    return rows


def jsonl(rows: Sequence[Row | str]) -> str:
    """A row that is a text stands as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def files(contents: dict[str, bytes | str], suffix: str = "") -> Write:
    """Writes files, and names the only one, or the folder of several."""

    def write(folder: Path) -> str:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path if len(contents) == 1 and path.parent == folder else folder / "set") + suffix

    return write


DEEP = "[" * 100_000 + "]" * 100_000
DEEP_BY_100 = "[" * 100 + "]" * 100
KIND = "neither text nor a list of messages"
NUL, HALF = "the character NUL", "half a character"
USER, PART = {"role": "user", "content": "1+2="}, "a part of a message's content"


def message(**changes: Any) -> str:
    return json.dumps([{**USER, **changes}])


def answered(content: str, **more: Any) -> str:
    return json.dumps([USER, {"role": "assistant", "content": content, **more}])


Case = tuple[str, str, str]  # JSON text of the value, what becomes of it, part of the message
PROMPTS: list[Case] = [
    *((text, "refused", KIND) for text in ("null", "7", "true", "NaN", "{}", '["1+2="]', DEEP_BY_100)),
    *((text, "refused", "is empty") for text in ('""', '"\\n\\t"', '"\\u3000"')),
    *(('"NUL\\u0000"', "refused", NUL), ('"\\ud800 alone"', "refused", HALF), ('"\\ude00\\ud83d"', "refused", HALF)),
    (DEEP, "refused", "nested too deeply"),
    (json.dumps("1+" * 1_000_000), "refused", "more than 1,000,000 characters"),
]
LABELS: list[Case] = [
    ("null", "warned", "is null"),
    *((text, "refused", "not finite") for text in ("NaN", "-Infinity", "1e999", "[1, NaN]")),
    *(('"NUL\\u0000"', "refused", NUL), ('"\\udc00"', "refused", HALF), ('{"\\ud800": 1}', "refused", HALF)),
    (DEEP_BY_100, "refused", "more than 64 deep"),
    ("9" * 5000, "refused", "too many digits"),
    ('{"a": 1, "a": 2}', "refused", "stands twice"),
]
METADATA: list[Case] = [
    *((text, "refused", "not a JSON object") for text in ("[1]", "7", '"[1]"', '"3"')),
    *((text, "refused", "not valid JSON") for text in ('"{level: 1}"', '"{\\"level\\": "')),
    (json.dumps(DEEP), "refused", "nested too deeply"),
    (json.dumps('{"a": 1, "a": 2}'), "refused", "stands twice"),
    *((text, "warned", "not finite") for text in (json.dumps('{"a": NaN}'), '{"a": [1e400]}')),
    ('{"a": "\\udfff"}', "refused", HALF),
    ('{"a": ' + DEEP_BY_100 + "}", "refused", "64 deep"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "refused", "nested too deeply"),
    *((text, "same", "") for text in ("null", '""')),
]
TOOLS: list[Case] = [
    *((text, "refused", "not a list of tools") for text in ("{}", '["calc"]', '"{}"', "[[]]")),
    ('"calc("', "refused", "not valid JSON"),
    ('[{"name": "calc", "limit": NaN}]', "refused", "not finite"),
    ('""', "same", ""),
]
CHATS: list[Case] = [
    ("[]", "refused", "is empty"),
    *((text, "refused", KIND) for text in ("[null]", '["1+2="]', "{}", "null", json.dumps([[USER]]))),
    ('[{"content": "1+2="}]', "refused", KIND),
    *((message(role=role), "refused", KIND) for role in (None, 3, ["user"])),
    *((message(role=role), "refused", "is not one word") for role in ("", "the user", "user\n", "user\x00", "u" * 200)),
    (message(role="user<|end|>"), "refused", "holds a special token"),
    ('[{"role": "\\ud800", "content": "x"}]', "refused", "is not one word"),
    *((message(role=role), "warned", "is unusual") for role in ("human", "User")),
    *((message(content=content), "refused", KIND) for content in (3, True, {"text": "1+2="})),
    *((text, "refused", "has no content") for text in (message(content=None), '[{"role": "user"}]')),
    *((message(content=content), "refused", "is empty") for content in ("", "  ")),
    (message(content="1+\x002="), "refused", NUL),
    ('[{"role": "user", "content": "\\ud800"}]', "refused", HALF),
    ('[{"role": "user", "content": "1", "name": "\\ud800"}]', "refused", HALF),
    *((message(content=f"{mark}3"), "warned", "holds a special token") for mark in ("<|end|>", "<|assistant|>")),
    *((message(content=[part]), "refused", PART) for part in ("1+2=", None, {"text": "1+2="}, {"type": "text"})),
    (message(content=[{"type": "text", "text": 3}]), "refused", PART),
    (message(content=[{"type": "video", "video": "1+2="}]), "refused", "chat template"),
    (f'[{{"role": "user", "content": {DEEP_BY_100}}}]', "refused", "64 deep"),
    ('[{"role": "user", "content": "1", "content": "2"}]', "refused", "stands twice"),
    *((message(tool_calls=c), "refused", "tool_calls") for c in ("x", ["x"], [{"function": {}}], [{"function": "x"}])),
    (answered("3"), "warned", "ends with the assistant's turn"),
]
STRICT: list[Case] = [
    *((json.dumps(roles), "refused", "roles must alternate") for roles in ([USER, USER], [{**USER, "role": "system"}]))
]
SFT: list[Case] = [
    (json.dumps([USER]), "refused", "without an assistant turn"),
    *((answered("3", step_loss_mask=mask), "refused", "step_loss_mask") for mask in (2, "0", 0, [1])),
    *((answered(text), "warned", "special") for text in ("3<|end|>4", "<|user|>")),
    (answered("\x00"), "refused", NUL),
    ('"1+2="', "valid", ""),
]
COLUMNS: list[Case] = [
    ('{"label": "3"}', "refused", "column 'prompt' is missing"),
    ('{"prompt": "1+2="}', "refused", "column 'label' is missing"),
    ("{}", "refused", "the row has no columns"),
    ('{"Prompt": "1+2=", "label": "3"}', "refused", "--input-key Prompt?"),
    ('{"question": "1+2=", "answer": "3"}', "refused", "--input-key question?"),
    ('{"promt": "1+2=", "label": "3"}', "refused", "--input-key promt?"),
    ('{"\\ud800\\u0000": "1+2=", "label": "3"}', "refused", "column 'prompt' is missing"),
    ('{"prompt": "1", "prompt": "2", "label": "3"}', "refused", "stands twice"),
]


def row_mutations() -> Iterator[Mutation]:
    """One bad row between good ones, as a line of .jsonl and as an element of an array in .json."""
    tables = (
        *(("prompt", "text", PROMPTS), ("label", "text", LABELS), ("metadata", "text", METADATA)),
        *(("tools", "chat", TOOLS), ("prompt", "chat", CHATS), ("prompt", "strict", STRICT), ("prompt", "sft", SFT)),
    )
    for key, mode, table in tables:
        first, second, *last = good_rows(mode)
        for value, expect, says in table:
            fields = (f"{json.dumps(name)}: {value if name == key else json.dumps(second[name])}" for name in second)
            line, name = "{" + ", ".join(fields) + "}", f"{mode}: {key} {value:.60}"
            yield Mutation(name, files({"data.jsonl": jsonl([first, line, *last])}), expect, says, mode)
            if len(line) < 100_000:  # a megabyte in an array is the same as in a line
                array = "[" + ",\n".join([json.dumps(first), line, *map(json.dumps, last)]) + "]"
                yield Mutation(f"{name}, in an array", files({"data.json": array}), expect, says, mode)
    first, _, *last = good_rows("text")
    for line, expect, says in COLUMNS:
        yield Mutation(f"columns {line}", files({"data.jsonl": jsonl([first, line, *last])}), expect, says)
        yield Mutation(f"columns {line} in all rows", files({"data.jsonl": jsonl([line] * 500)}), expect, says)


def text_mutations() -> Iterator[Mutation]:
    """Encodings, line ends, and what is not JSON."""
    text = jsonl(good_rows("text"))
    plain, lines = text.encode(), text.splitlines()
    for mode in MODES:
        yield Mutation(f"good rows: {mode}", files({"data.jsonl": jsonl(good_rows(mode))}), "same", mode=mode)
    same: dict[str, bytes | str] = {
        "byte order mark before each line": b"".join(b"\xef\xbb\xbf" + row for row in plain.splitlines(True)),
        "carriage returns": plain.replace(b"\n", b"\r\n"),
        "blank lines": plain.replace(b"\n", b"\n\n \t\n"),
        "escapes for plain letters": text.replace("=", "\\u003d"),
    }
    for name, content in same.items():
        yield Mutation(name, files({"data.jsonl": content}), "same")
    refused: list[tuple[str, bytes | str, str]] = [
        ("carriage returns alone", plain.replace(b"\n", b"\r"), "Extra data"),
        *((code, text.encode(code), "UTF" if code in ("utf-16", "utf-32") else "") for code in ("utf-16", "utf-32-be")),
        ("Latin-1", plain.replace(b"1+2=", "1+2=é".encode("latin-1")), "utf-8"),
        ("NUL inside a text", plain.replace(b"1+2=", b"1+\0" + b"2="), "Invalid control character"),
        ("a line break inside a text", text.replace("1+2=", "1+\n2="), "line 1"),
        *((f"no rows: {content!r}", content, "no rows") for content in (b"", b" \n\t\n")),
        ("gzip", gzip.compress(plain, mtime=0), "gzip"),
        *(("zip", b"PK\x03\x04" + bytes(60), "zip"), ("zstd", b"\x28\xb5\x2f\xfd" + bytes(60), "zstd")),
        *(("parquet", b"PAR1" + bytes(200) + b"PAR1", "parquet"), ("Arrow", b"ARROW1" + bytes(200), "Arrow")),
        ("CSV", "prompt,label\n1+2=,3\n", "not valid JSON in 2 of 2 rows"),
        ("an array on one line", json.dumps(good_rows("text")), "no JSON object"),
        ("rows as arrays", '["1+2=", "3"]\n' * 4, "no JSON object in 4 of 4 rows (lines 1, 2, 3, …)"),
        ("a line of 65 MiB", b'{"prompt": "' + b"1" * (65 << 20) + b'"}\n', "more than 64 MiB"),
    ]
    second = lines[1]
    broken = (
        *(second + lines[2], second + ",", second[:-1] + ",}", "# easy", second.replace('"', "'"), second[:-1]),
        *(second.replace("null", "None"), second.replace('{"level": 1}', '{"level": 01}')),
        *(second.replace("3+4", "\\x33+4"), "3", "null", "[" * 100_000, '{"a":' * 100_000),
    )
    for line in broken:
        refused.append((f"broken JSON {line:.80}", "\n".join([lines[0], line, *lines[2:]]), "line 2: "))
    for name, content, says in refused:
        yield Mutation(name, files({"data.jsonl": content}), "refused", says)


def array_mutations() -> Iterator[Mutation]:
    """Files of .json."""
    rows = good_rows("text")
    array = json.dumps(rows)
    for content in (json.dumps(rows, indent=2), b"\xef\xbb\xbf \n" + array.encode(), jsonl(rows)):
        yield Mutation(f"json {content[:40]!r}", files({"data.json": content}), "same")
    refused: tuple[tuple[bytes | str, str], ...] = (
        *(("[]", "no rows"), ("", "no rows")),
        ("[1, 2]", "no JSON object in 2 of 2 rows (rows 1, 2)"),
        (f"[{array}]", "row 1: no JSON object"),
        (array.replace("}, {", "}, null, {", 1), "row 2: no JSON object"),
        (array[:-1] + ",]", "row 5"),
        (array.replace("}, {", "} {", 1), "row 1"),
        (array.replace("}, {", "},, {", 1), "row 2"),
        (array[:-1], "row 4"),
        *((array + "x", "Extra data"), (array + array, "Extra data")),
        (array[: len(array) // 2], "not a valid JSON array"),
        (json.dumps({"data": rows}, indent=1), "one JSON object"),
        (array.encode("utf-16"), ""),
        (DEEP, "nested too deeply"),
    )
    for number, (content, says) in enumerate(refused):
        yield Mutation(f"json, refused {number}", files({"data.json": content}), "refused", says)


def path_mutations() -> Iterator[Mutation]:
    """Paths that do not name a regular file."""
    text = jsonl(good_rows("text"))

    def other(make: Callable[[Path], None]) -> Write:
        def write(folder: Path) -> str:
            make(folder / "data.jsonl")
            return str(folder / "data.jsonl")

        return write

    yield Mutation("no file", lambda folder: str(folder / "none.jsonl"), "refused", "no such file")
    yield Mutation("an empty folder", other(Path.mkdir), "refused", "not a folder that datasets")
    yield Mutation("a pipe", other(lambda path: os.mkfifo(path)), "refused", "no such file")
    yield Mutation("a device", lambda folder: "/dev/zero", "refused", "no such file")
    for name in ("data.csv", "data", "data.jsonl.gz", "data.JSONL"):
        yield Mutation(f"the name {name}", files({name: text}), "refused", "unknown suffix")
    yield Mutation("all rows by a slice", files({"data.jsonl": text}, "@[0:4]"), "same")
    written = "a slice of the rows is written PATH@[START:STOP]"
    cures = dict.fromkeys(("@[1]", "@[a:b]", "@[1:"), written) | {"@[10:]": "no rows", ":train": "no such file"}
    for suffix, says in cures.items():
        yield Mutation(f"suffix {suffix}", files({"data.jsonl": text}, suffix), "refused", says)


def table(**changes: Any) -> Any:
    rows = good_rows("text")
    values = {"prompt": [row["prompt"] for row in rows], "label": [row["label"] for row in rows]} | changes
    return pa.table({name: column for name, column in values.items() if column is not None})


def parquet(content: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(content, out, **options)
    return out.getvalue()


def table_mutations() -> Iterator[Mutation]:
    """Parquet files."""
    good, prompts, labels = parquet(table()), table()["prompt"], table()["label"]
    texts, chats = prompts.to_pylist(), [row["prompt"] for row in good_rows("chat")]
    seconds = pa.array([1, 2, 3, 4], pa.timestamp("s"))
    named = [[{**turn, "name": None} for turn in chat] for chat in chats]
    twice = pa.Table.from_arrays([prompts, prompts, labels], names=["prompt", "prompt", "label"])
    pairs = pa.array([[("level", 1)]] * 4, pa.map_(pa.string(), pa.int64()))
    times = table(metadata=pa.StructArray.from_arrays([seconds], ["at"]))
    unreadable = "not a readable parquet file"
    cases: list[tuple[Any, str, str, str]] = [
        *((parquet(table(), compression=codec), "same", "", "text") for codec in ("zstd", "none")),
        (table(prompt=prompts.dictionary_encode()), "same", "", "text"),
        (pa.table({"question": prompts, "label": labels}), "refused", "--input-key question?", "text"),
        (twice, "refused", "several columns have the name 'prompt'", "text"),
        (table().slice(0, 0), "refused", "no rows", "text"),
        *((table(prompt=c), "refused", KIND, "text") for c in ([1, 2, 3, 4], prompts.cast(pa.binary()), [["x"]] * 4)),
        *((table(prompt=[texts[0], bad, *texts[2:]]), "refused", "row 2", "text") for bad in (None, "", "\0")),
        (table(label=["3", None, "11", "15"]), "warned", "is null", "text"),
        (table(label=[3, 7, 11, 15]), "valid", "", "text"),
        *((table(label=[3.0, float(bad), 11.0, 15.0]), "refused", "not finite", "text") for bad in ("nan", "inf")),
        *((table(label=seconds), "refused", "of the kind datetime", "text"), (times, "refused", "datetime", "text")),
        (table(label=labels.cast(pa.binary())), "refused", "of the kind bytes", "text"),
        *((table(metadata=column), "refused", "not a JSON object", "text") for column in ([[1]] * 4, pairs)),
        (table(metadata=['{"level": 1}'] * 4), "same", "", "text"),
        (table(metadata=['{"level": 1}', "{", "{}", "{}"]), "refused", "row 2", "text"),
        *((table(prompt=column), "same", "", "chat") for column in (chats, named)),
        *((table(prompt=[chats[0], bad, *chats[2:]]), "refused", KIND, "chat") for bad in (None, [None])),
        *((content, "refused", unreadable, "text") for content in (b"", good[:4], good[:-8], good[: len(good) // 2])),
        *((content, "refused", "", "text") for content in (good[8:], good[:-8] + b"\xff\xff\xff\xff" + good[-4:])),
    ]
    for number, (content, expect, says, mode) in enumerate(cases):
        content = content if isinstance(content, bytes) else parquet(content)
        yield Mutation(f"parquet {number}", files({"data.parquet": content}), expect, says, mode)


def folder_mutations() -> Iterator[Mutation]:
    """Folders as `datasets.save_to_disk` writes them."""
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table().schema) as writer:
        writer.write_table(table())
    arrow, state = out.getvalue(), json.dumps({"_data_files": [{"filename": "data.arrow"}]})
    good: dict[str, bytes | str] = {"set/state.json": state, "set/data.arrow": arrow}
    listed: dict[str, bytes | str] = {"set/dataset_dict.json": json.dumps({"splits": ["train", "test"]})}
    splits = {name.replace("/", f"/{split}/"): good[name] for name in good for split in ("train", "test")} | listed
    yield Mutation("folder", files(good), "same")
    yield Mutation("folder: a split", files(splits, ":train"), "same")
    yield Mutation("folder: no split is named", files(splits), "refused", "choose one of its splits train, test, as in")
    yield Mutation("folder: a split that is not there", files(splits, ":dev"), "refused", "choose one of its splits")
    yield Mutation("folder: a split of a folder without", files(good, ":train"), "refused", "it has no splits")
    yield Mutation("folder: a split without its folder", files(listed, ":train"), "refused", "no state.json")
    for text in ("{", "", "[]", DEEP, "{}", '{"splits": 3}'):
        spoilt = files(splits | {"set/dataset_dict.json": text}, ":train")
        yield Mutation(f"dataset_dict.json {text:.9}", spoilt, "refused")
    named = ("../set/data.arrow", "/dev/zero", "other.arrow")
    states = (json.dumps({"_data_files": [{"filename": name}]}) for name in named)
    for text in ("{", "[]", DEEP, "{}", '{"_data_files": "data.arrow"}', '{"_data_files": [{}]}', *states):
        yield Mutation(f"state.json {text:.70}", files(good | {"set/state.json": text}), "refused")
    for content in (b"", b"rows", arrow[: len(arrow) // 4], arrow[: len(arrow) // 2]):
        yield Mutation(f"Arrow file of {len(content)} bytes", files(good | {"set/data.arrow": content}), "refused")


def random_mutations() -> Iterator[Mutation]:
    """Bytes that were changed, cut out or doubled at random places."""
    rows = good_rows("text")
    texts = {"data.jsonl": jsonl(rows), "data.json": json.dumps(rows)}
    sources = {name: text.encode() for name, text in texts.items()} | {"data.parquet": parquet(table())}
    for file, good in sources.items():
        for number in range(3 * NUM_RANDOM):
            draw = random.Random(f"{file} {number}")
            start = draw.randrange(len(good) - 1)
            stop = min(len(good), start + draw.choice((1, 1, 2, 8, 64)))
            middle = (bytes(draw.randrange(256) for _ in range(stop - start)), b"", good[start:stop] * 2)[number % 3]
            content: dict[str, bytes | str] = {file: good[:start] + middle + good[stop:]}
            yield Mutation(f"random bytes {number} of {file}", files(content), "valid")


class Judge:
    """Reads what mutations wrote in the three ways that data is read. `folder` gets the models' tokenizers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizers, self._files = {}, {}
        for name in ("plain", "strict"):
            tokenizer = build_tokenizer()
            if name == "strict":
                tokenizer.chat_template = STRICT_TEMPLATE
            tokenizer.save_pretrained(folder / name)
            self._tokenizers[name], self._files[name] = tokenizer, read_tokenizer_files(folder / name)

    def faults(self, mutation: Mutation, folder: Path) -> list[str]:
        """Write the mutation below `folder`, an empty one, and read it; return what is wrong with the answers."""
        spec, mode = mutation.write(folder), mutation.mode
        columns = PromptColumns("prompt", "label", tool_key="tools", apply_chat_template=mode in ("chat", "strict"))
        name, is_sft = "strict" if mode == "strict" else "plain", mode == "sft"
        tokenizer, files = self._tokenizers[name], self._files[name]
        probe = template_probe(files, columns, lambda: tokenizer, "auto" if is_sft else None)
        samples: list[Any] = []

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

        faults, errors, warnings = [], {}, {}
        for way in (plan, command, run):
            start = time.perf_counter()
            try:
                errors[way.__name__], warnings[way.__name__] = way()
            except Exception as error:  # any exception is what this program looks for
                faults.append(f"{way.__name__} raised {type(error).__name__}: {error}")
                errors[way.__name__] = warnings[way.__name__] = []
            if (seconds := time.perf_counter() - start) > LIMIT_S:
                faults.append(f"{way.__name__} took {seconds:.1f} s")
        messages = errors["plan"] + warnings["plan"]
        verdict = "refused" if errors["plan"] else "warned" if messages else _same_or_valid(samples, mode)
        if mutation.expect not in (verdict, "valid"):
            faults.append(f"{verdict}, and not {mutation.expect}: {messages}")
        if mutation.says and not any(mutation.says in text for text in messages):
            faults.append(f"no message has {mutation.says!r}: {messages}")
        # --mode sft makes its loss masks when rows are drawn, which reading them does not.
        ways = ("plan", "command") if is_sft else ("plan", "command", "run")
        # Only the check looks for a prompt that stands twice, which random changes can make of two.
        is_double = len(errors["command"]) == 1 and "the same prompt as an earlier row" in errors["command"][0]
        if len({bool(errors[way]) for way in ways}) > 1 and not is_double:
            faults.append(f"plan, check and run do not agree: {errors}")
        if len(messages) > 4 or any("\n" in text or len(text) > 1000 for text in messages):
            faults.append(f"it takes more than a line a cause: {messages}")
        return faults


def _same_or_valid(samples: list[Any], mode: str) -> str:
    def bare(messages: list[Row]) -> list[Row]:
        return [{key: value for key, value in turn.items() if value is not None} for turn in messages]

    prompts = [sample.prompt if mode in ("text", "sft") else bare(sample.messages) for sample in samples]
    read = list(zip(prompts, [sample.label for sample in samples], strict=True))
    return "same" if read == [(row["prompt"], row["label"]) for row in good_rows(mode)] else "valid"


def test_no_mutation_passes_in_silence_or_ends_in_a_traceback(tmp_path: Path) -> None:
    makes = (row_mutations, text_mutations, array_mutations, path_mutations, table_mutations, folder_mutations)
    mutations = [mutation for make in (*makes, random_mutations) for mutation in make()]
    assert len(mutations) >= 200
    judge, faults = Judge(tmp_path / "models"), []
    for number, mutation in enumerate(mutations):
        folder = tmp_path / str(number)
        folder.mkdir()
        faults += [f"{mutation.name}: {fault}" for fault in judge.faults(mutation, folder)]
        shutil.rmtree(folder)
    assert faults == []
