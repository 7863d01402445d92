"""Read rows from JSON text, and refuse what Python's reader lets pass: a key twice in an object, bytes of no UTF-8.

`NaN` and `Infinity`, which Python's reader takes too, come as floats: whether they matter depends on the column
(see row_checks.py).
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

        Raises:
            ValueError: no JSON, a key twice in one object, a number of too many digits, or too many levels.
        """
        value, end = self.decode(text, 0 if text[:1] == "{" else after_space(text, 0))
        if text[end:] not in ("", "\n") and after_space(text, end) != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        if isinstance(value, DuplicateKey):
            raise value
        return value

    def decode(self, text: str, start: int) -> tuple[object, int]:
        """(value that begins at `start`, position behind it); the value is a DuplicateKey where it holds one.

        Raises:
            ValueError: as `parse`, but for the key.
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

    Raises:
        ValueError: the file holds something else than text, or a line that is too long to read.
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

    Raises:
        ValueError: no JSON array; names the row where reading stops.
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
