"""Values of a step (Python, numpy, torch) as JSON, and text of models and data made safe for a terminal. Pure."""

import dataclasses
import enum
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson

Scalar = float | int | str | bool | None
_PLAIN = frozenset((type(None), bool, int, str))  # JSON has them as they are


def to_scalar(key: str, value: object) -> Scalar:
    """`value` as a Python scalar; arrays and tensors of one element count as scalars.

    Raises ValueError, naming `key`, for anything that is not a single number, string, bool or None.
    """
    if hasattr(value, "item") and callable(value.item):
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"metric {key!r} has shape {shape}; log one number, e.g. its mean")
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"metric {key!r} is a {type(value).__name__} ({value!r}); log a number or a string")


def to_jsonable(value: object) -> object:
    """`value` with arrays and tensors as nested lists, enums as their values, NaN and infinities as null.

    An object of no known kind (a user may put anything into a sample's metadata) becomes its `repr`.
    """
    if type(value) in _PLAIN:  # most values
        return value
    if isinstance(value, enum.Enum):  # before str: a str-valued Enum is a str, too
        return to_jsonable(value.value)
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key.value if isinstance(key, enum.Enum) else key): to_jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_jsonable(item) for item in value), key=repr)
    if hasattr(value, "tolist") and callable(value.tolist):
        return to_jsonable(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    return repr(value)


def json_line(row: Mapping[str, object]) -> bytes:
    """`row` as one line of strict JSON in UTF-8, newline included."""
    return to_json(row) + b"\n"


def to_json(value: object) -> bytes:
    """`value` as strict JSON in UTF-8; NaN and infinities are null. An array's numbers are exact for its type."""
    try:  # arrays as they stand: as lists, a long sample's numbers take thirty times as long
        return orjson.dumps(value, default=to_jsonable, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a key that is not a string, an integer of more than 64 bits, half a surrogate pair
        text = json.dumps(to_jsonable(value), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "backslashreplace")


def parse_object(text: bytes) -> dict[str, object] | None:
    """The object that a line of JSON holds; None for anything else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(text)  # takes what orjson refuses: half a surrogate pair, integers of more than 64 bits
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, object] | None:
    """The object that a JSON file holds; None where there is no such file, or something else in it."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def write_atomically(path: Path, content: str | Iterable[bytes]) -> None:
    """Write a file next to `path`, then rename it: a reader never sees half a file, and an error leaves none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link that another user made
    try:
        with temporary.open("xb") as file:
            file.writelines([content.encode()] if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# Control characters (ESC and the 8-bit CSI among them), line and paragraph separators, embeddings and overrides of the
# writing direction, and halves of surrogate pairs, which no encoding can write.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SPOKEN = {"role", "content"}  # a message has one of them, or both


def as_text(value: object) -> str:
    """A prompt, a response or a label as text; of messages each one's role and content on lines of its own."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and _SPOKEN & part.keys() for part in value):
        return "\n".join(f"{part.get('role', '')}: {part.get('content', '')}" for part in value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, a value that contains itself
        return str(value)


def visible(text: str, keep_lines: bool = False) -> str:
    r"""`text` with every character that could steer a terminal written as Python writes it: \x1b, \r, \u202e.

    keep_lines  line feeds and tabs stay; else they are written as \n and \t, so that the text is one line.
    """
    kept = "\n\t" if keep_lines else ""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in kept else ascii(match[0])[1:-1], text)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, more of its start than of its end, with a note of how many were cut.

    0 cuts nothing. The note itself is not counted.
    """
    if limit <= 0 or len(text) <= limit:
        return text
    end = limit * 2 // 5
    head, tail = text[: limit - end], text[len(text) - end :]
    return f"{head}[… {len(text) - limit:,} characters cut …]{tail}"


def ending(text: str, limit: int) -> str:
    """The last `limit` characters of `text`, with an ellipsis where there are more."""
    return text if len(text) <= limit else f"…{text[len(text) - limit :]}"
