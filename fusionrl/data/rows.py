"""Paths of prompts, `[NAME=]PATH[:SPLIT][@[START:STOP]]`, and the rows that such a path names.

PATH is a .jsonl, .json or .parquet file, a folder of such files as data sets are published (`find_splits`), or a folder
that `datasets.save_to_disk` wrote. The last is read by pyarrow alone: its `state.json` lists Arrow stream files, its
`dataset_dict.json` the splits.

JSON is read strictly, and what Python's reader lets pass is refused: a key twice in an object, bytes of no UTF-8. `NaN`
and `Infinity` come as floats: whether they matter depends on the column (see row_checks.py).
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import hint, install_hint
from fusionrl.data.findings import Finding, FindingError

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Schema
    from pyarrow.ipc import RecordBatchStreamReader


FORMATS = "a .jsonl, .json or .parquet file, a folder of such files (FOLDER:SPLIT), or one of datasets.save_to_disk"
SUFFIXES = (".parquet", ".jsonl", ".json")
_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")  # of a data set, not its rows
_SPEC = re.compile(r"(?:([\w-]+)=)?(.+?)(?:@\[(-?\d+)?:(-?\d+)?\])?")


@dataclass(frozen=True)
class PromptSet:
    """One set of prompts: where it is, and which of its rows are meant."""

    path: Path
    split: str | None = None
    start: int | None = None
    stop: int | None = None
    given_name: str | None = None

    @property
    def name(self) -> str:
        """The name that was given, or one made of the path: `data/gsm 8k.jsonl` → `gsm-8k`."""
        if self.given_name is not None:
            return self.given_name
        stem = self.path.stem if self.path.suffix in SUFFIXES else self.path.name
        return re.sub(r"[^\w-]+", "-", stem + (f"-{self.split}" if self.split else ""))


def parse_set(spec: str | Path, flag: str = "--prompt-data") -> PromptSet:
    """Read `[NAME=]PATH[:SPLIT][@[START:STOP]]`; what exists as it stands is a path, whatever its characters.

    Raises ValueError: a slice that is none.
    """
    if isinstance(spec, Path) or Path(spec).exists():
        return PromptSet(Path(spec))
    match = _SPEC.fullmatch(spec)
    if match is None or re.search(r"@\[[^]]*\]?$", match[2]):
        raise ValueError(f"{flag} {spec}: a slice of the rows is written PATH@[START:STOP], e.g. data.jsonl@[100:-50]")
    name, text, *bounds = match.groups()
    start, stop = (None if bound is None else int(bound) for bound in bounds)
    path, split = Path(text), None
    folder, colon, tail = text.rpartition(":")
    if colon and not path.exists() and Path(folder).is_dir():
        path, split = Path(folder), tail
    return PromptSet(path, split, start, stop, name)


def parse_sets(specs: Iterable[str]) -> list[PromptSet]:
    """Read several; their names must differ, since samples and metrics bear them.

    Raises ValueError: as `parse_set`, or two sets of one name.
    """
    sets = [parse_set(spec) for spec in specs]
    names = [prompt_set.name for prompt_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--prompt-data: two sets have the name {name!r}; name them, as in NAME=PATH")
    return sets


def read_rows(spec: str | Path, flag: str = "--prompt-data") -> Iterator[tuple[str, Row]]:
    """(place, row) of a set, the place being `line 3` in a file of lines and `row 3` elsewhere, both from 1.

    Raises ValueError: nothing readable there, or a line that is not a JSON object; names `flag`, file and place.
    """
    for place, row in scan_rows(spec, flag):
        if isinstance(row, ValueError):
            raise ValueError(f"{flag} {spec}: {place}: {line_finding(row)}")
        yield place, row


def line_finding(error: ValueError) -> Finding:
    """Return the finding of a line that is not a row."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return Finding("not valid JSON", str(error))
    if isinstance(error, DuplicateKey):
        return Finding("a key stands twice in one object", str(error))
    return Finding(str(error))


def scan_rows(spec: str | Path, flag: str) -> Iterator[tuple[str, Row | ValueError]]:
    """As `read_rows`, but yield the error of a line that is not a row."""
    prompt_set = parse_set(spec, flag)
    try:
        # A negative bound counts from the end, so that all must be read first; malformed lines count as rows.
        bounds = [prompt_set.start, prompt_set.stop]
        num_rows = sum(1 for _ in _read(prompt_set)) if any(bound is not None and bound < 0 for bound in bounds) else 0
        start, stop = (bound if bound is None or bound >= 0 else max(0, bound + num_rows) for bound in bounds)
        yield from itertools.islice(_read(prompt_set), start, stop)
    except ImportError as error:
        raise ValueError(f"{flag} {spec}: reading it needs the package pyarrow; {install_hint('pyarrow')}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise ValueError(f"{flag} {spec}: {error}") from error


def _read(prompt_set: PromptSet) -> Iterator[tuple[str, Row | ValueError]]:
    path = prompt_set.path
    if path.is_dir():
        return _read_folder(path, prompt_set.split)
    if not path.is_file():
        raise ValueError(f"there is no such file{hint(path)}")
    readers = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": read_lines}
    if path.suffix not in readers:
        raise ValueError(f"unknown suffix {path.suffix!r}; give {FORMATS}")
    return readers[path.suffix](path)


def _read_json(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    """An array, or an object a line as in .jsonl."""
    with path.open("rb") as file:
        head = file.read(3)
        if head != b"\xef\xbb\xbf":  # the byte order mark of UTF-8
            file.seek(0)
        while (character := file.read(1)).isspace():
            pass
        if character == b"[":
            return read_array(path)
        line = character + file.readline(MAX_LINE_BYTES)
    if character == b"{" and not _is_object(line) and path.stat().st_size <= MAX_LINE_BYTES:
        content = path.read_bytes()
        if _is_object(content):
            raise ValueError("one JSON object over several lines; give an array of objects, or one object a line")
    return read_lines(path)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(StrictDecoder().parse(text.decode("utf-8-sig")), dict)
    except ValueError:
        return False


def _read_parquet(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_names(file.schema_arrow.names)
        yield from _numbered(file.iter_batches(**_batch_size(file.schema_arrow)))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"not a readable parquet file ({_first_line(error)})") from error


_BINARY_ROWS = 16  # of images at once: a row may have megabytes


def _batch_size(schema: Schema) -> dict[str, int]:
    """Return the keyword by which few rows are read at once, where a column holds bytes."""
    import pyarrow

    def holds_bytes(kind: DataType) -> bool:
        inner = [kind.field(i).type for i in range(kind.num_fields)]
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or any(map(holds_bytes, inner))

    return {"batch_size": _BINARY_ROWS} if any(holds_bytes(field.type) for field in schema) else {}


def _check_names(names: list[str]) -> None:
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        raise ValueError(f"several columns have the name {double[0]!r}")


def _first_line(error: Exception) -> str:
    """Return the first line of an Arrow message; the others name lines of its source."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def _read_folder(path: Path, split: str | None) -> Iterator[tuple[str, Row | ValueError]]:
    if find_splits(path) and not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        for file in choose_split(path, split, str(path)):
            yield from ((f"{file.name}, {place}", row) for place, row in _read(PromptSet(file)))
        return
    import pyarrow.ipc

    if (path / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json_list(path / "dataset_dict.json", "splits")]
        if split is None and len(splits) == 1:
            split = splits[0]
        if split is None or split not in splits:
            example = f", as in {path}:{splits[0]}" if splits else ""
            raise ValueError(f"choose one of its splits {', '.join(splits)}{example}")
        path = path / split
    elif split is not None:
        raise ValueError(f"it has no splits, so none named {split!r}")
    if not (path / "state.json").is_file():
        raise ValueError(
            f"{path} is not a folder that datasets.save_to_disk wrote (it has no state.json); give {FORMATS}"
        )
    names = [str(file["filename"]) for file in _json_list(path / "state.json", "_data_files") if isinstance(file, dict)]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"state.json names the file {name!r}, which is not in the folder")
    try:
        streams = (pyarrow.ipc.open_stream(pyarrow.memory_map(str(path / name))) for name in names)
        yield from _numbered(_batches(streams))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"not a readable Arrow file ({_first_line(error)})") from error


def _batches(streams: Iterable[RecordBatchStreamReader]) -> Iterator[RecordBatch]:
    for stream in streams:
        _check_names(stream.schema.names)
        size = _batch_size(stream.schema).get("batch_size")
        for batch in stream:
            parts = [batch] if size is None else [batch.slice(i, size) for i in range(0, batch.num_rows, size)]
            yield from parts


def _json_list(path: Path, key: str) -> list[object]:
    """The list under `key` of the object in a JSON file."""
    try:
        state = StrictDecoder().parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    values = state.get(key) or []
    if not isinstance(values, list):
        raise ValueError(f"{path.name}: {key} is no list")
    return values


def _numbered(batches: Iterable[RecordBatch]) -> Iterator[tuple[str, Row | ValueError]]:
    """Rows of Arrow's record batches."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: object) -> object:
    """Drop the null fields of structs: all rows of a column have all fields, also those that a row did not write."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------------ splits of a folder
def find_splits(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """(configuration, split) -> its files, in order; the configuration is "" for files in `folder` or its data/.

    A split is one or several files, a configuration a folder: train.jsonl, data/test-00000-of-00001.parquet,
    main/train-00001-of-00002.parquet, default/train/0000.parquet.
    A split of which a part is missing, as the files' names number them, is left out.
    """
    files_of: dict[tuple[str, str], list[Path]] = {}
    totals: dict[tuple[str, str], int] = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if path.suffix not in SUFFIXES or path.name in _ABOUT or is_hidden or not path.is_file():
            continue
        parts, stem = list(place.parts[:-1]), path.stem
        shard = _SHARD.fullmatch(stem)
        if shard is not None:
            split = shard[1]
        elif stem.isdecimal() and parts:
            split = parts.pop()
        else:
            split = stem
        configuration = "/".join(part for part in parts if part != "data")
        files_of.setdefault((configuration, split), []).append(path)
        if shard is not None:
            totals[configuration, split] = int(shard[3])
    return {key: files for key, files in files_of.items() if totals.get(key, len(files)) == len(files)}


def choose_split(folder: Path, split: str | None, where: str) -> list[Path]:
    """The files of a split of `folder`; a configuration's only where the folder itself has none of that name.

    where  how the folder is called in messages

    Raises ValueError: no such split, or several; names those that there are.
    """
    splits = find_splits(folder)
    fitting = [key for key in splits if split is not None and key[1] == split]
    if len(fitting) == 1 or ("", split) in fitting:
        return splits[min(fitting)]
    if not splits:
        raise ValueError(f"{where}: it has no whole split in {', '.join(SUFFIXES)} files")
    names = [f"{where}{'/' + subset if subset else ''}:{name}" for subset, name in sorted(fitting or splits)]
    raise ValueError(f"{where}: choose one of its splits: {', '.join(names)}")


# ------------------------------------------------------------------------------------------------ JSON
Row = dict[str, Any]
NO_OBJECT = "no JSON object"

# Python's own reader would take minutes and fill the memory; no row of prompts is that large.
MAX_LINE_BYTES = 64 << 20
# Levels of lists and objects in a value. What copies, pickles and writes values recurses, several calls a level, and
# Python ends at a thousand.
MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
# First bytes of files that are often given the wrong suffix.
_MAGIC = {
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it first",
    b"PAR1": "a parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; give the folder that datasets.save_to_disk wrote",
    codecs.BOM_UTF32_LE: "UTF-32 text; convert it to UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16 text; convert it to UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text; convert it to UTF-8",
}


class StrictDecoder:
    """Decodes JSON values one after the other; not for several threads at once."""

    def __init__(self) -> None:
        self._double: list[str] = []
        decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self._scan: Callable[[str, int], tuple[object, int]] = decoder.scan_once  # type: ignore[attr-defined]

    def _object(self, pairs: list[tuple[str, object]]) -> Row:
        row = dict(pairs)
        if len(row) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            self._double += [key for key, count in counts.items() if count > 1]
        return row

    def parse(self, text: str) -> object:
        """The value of a JSON text.

        Raises ValueError: no JSON, a key twice in one object, a number of too many digits, or too many levels.
        """
        value, end = self.decode(text, 0 if text[:1] == "{" else after_space(text, 0))
        if text[end:] not in ("", "\n") and after_space(text, end) != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        if isinstance(value, DuplicateKey):
            raise value
        return value

    def decode(self, text: str, start: int) -> tuple[object, int]:
        """(value that begins at `start`, position behind it); the value is a DuplicateKey where it holds one.

        Raises ValueError: as `parse`, but for the key.
        """
        self._double.clear()
        try:
            value, end = self._scan(text, start)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", text, stop.value) from None
        except RecursionError:
            raise ValueError("lists and objects are nested too deeply") from None  # its frames say nothing
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python reads no integer of more digits than sys.get_int_max_str_digits()
            raise ValueError("a number has too many digits") from None
        if self._double:
            return DuplicateKey(f"the key {self._double[0]!r} stands twice in one object"), end
        return value, end


class DuplicateKey(ValueError):
    """A key stands twice in one object, so that it is not clear which value is meant."""


def after_space(text: str, start: int) -> int:
    """Return the position of the next character that is not white space, or the end."""
    match = _SPACE.match(text, start)
    assert match is not None  # it matches the empty text
    return match.end()


def read_lines(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    """(`line 3`, its object or what is wrong with it) of each line that is not blank.

    Raises ValueError: the file holds something else than text, or a line that is too long to read.
    """
    decoder = StrictDecoder()
    with path.open("rb") as file:
        head = file.peek(8)
        if kind := next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None):
            raise ValueError(f"it is {kind}")
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"line {number}: it has more than {MAX_LINE_BYTES >> 20} MiB; a row is one line")
            if line.isspace():
                continue
            yield f"line {number}", _read_row(decoder, line)


def _read_row(decoder: StrictDecoder, line: bytes) -> Row | ValueError:
    try:
        # A byte order mark is what some editors write at the start of a file.
        row = decoder.parse(line.decode().removeprefix("\ufeff"))
    except ValueError as error:
        return error
    return row if isinstance(row, dict) else ValueError(NO_OBJECT)


def read_array(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    """(`row 3`, its object or what is wrong with it) of each element of the array that a file holds.

    Raises ValueError: no JSON array; names the row where reading stops.
    """
    decoder, number = StrictDecoder(), 0
    text = path.read_bytes().decode("utf-8-sig")
    position = after_space(text, after_space(text, 0) + 1)  # behind the bracket
    try:
        while number or text[position : position + 1] != "]":
            number += 1
            row, position = decoder.decode(text, position)
            yield f"row {number}", row if isinstance(row, dict | DuplicateKey) else ValueError(NO_OBJECT)
            position = after_space(text, position)
            if text[position : position + 1] != ",":
                break
            position = after_space(text, position + 1)
        if text[position : position + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    except ValueError as error:
        raise ValueError(f"row {number}: not a valid JSON array ({error})") from error
    if after_space(text, position + 1) != len(text):
        raise ValueError(f"not a valid JSON array ({json.JSONDecodeError('Extra data', text, position + 1)})")


# ------------------------------------------------------------------------------------------------ columns of JSON
def read_metadata(value: object, key: str) -> dict[str, object]:
    """Return a new dictionary of the metadata, which may be JSON text. FindingError: no JSON object."""
    parsed = _from_json(value, key)
    if parsed is not None and not isinstance(parsed, dict):
        raise FindingError(Finding(f"column {key!r} is not a JSON object"))
    return dict(parsed or {})


def read_tools(value: object, key: str) -> list[dict[str, object]] | None:
    """The list of tools, or JSON text of it; None for an empty one. ValueError: no list of tools."""
    parsed = _from_json(value, key)
    if parsed is None or (isinstance(parsed, list) and all(isinstance(tool, dict) for tool in parsed)):
        return parsed or None
    raise FindingError(Finding(f"column {key!r} (--tool-key) is not a list of tools"))


def _from_json(value: object, key: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return StrictDecoder().parse(value) if value else None
    except ValueError as error:
        raise FindingError(Finding(f"column {key!r} is text, but not valid JSON", str(error))) from error
