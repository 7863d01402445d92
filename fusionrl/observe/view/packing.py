"""Numbers and JSON made small: what the page carries, and how its script unpacks it again."""

from __future__ import annotations

import base64
import math
import zlib

import orjson

from fusionrl.observe.json_values import to_jsonable

Number = float | int | None


class Packer:
    """Packs JSON text that is added piece by piece: deflate without a header, then base64.

    Base64 has no `<`, so no text of a model can end the element of the page that holds it.
    """

    def __init__(self) -> None:
        self._stream = zlib.compressobj(6, zlib.DEFLATED, -15)
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, text: bytes) -> None:
        """Add a piece of the text."""
        self._keep(self._stream.compress(text))

    def size(self) -> int:
        """Bytes of base64 so far, all that was added counted."""
        self._keep(self._stream.flush(zlib.Z_SYNC_FLUSH))
        return _in_base64(self._size)

    def text(self) -> str:
        """Return the whole in base64; nothing can be added after it."""
        self._keep(self._stream.flush())
        return base64.b64encode(b"".join(self._parts)).decode("ascii")

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)


def pack(value: object) -> str:
    """Pack one value."""
    packer = Packer()
    packer.add(to_json(value))
    return packer.text()


def unpack(text: str) -> object:
    """Return the value that `pack`, or a `Packer`, made `text` of."""
    return orjson.loads(zlib.decompress(base64.b64decode(text), -15))


def to_json(value: object) -> bytes:
    """JSON of what a rollout's file may hold; half a surrogate pair becomes a question mark."""
    try:
        return orjson.dumps(value, default=to_jsonable, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # half a surrogate pair, or an integer of more than 64 bits
        return orjson.dumps(_tame(value), default=to_jsonable)


def _tame(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {str(_tame(str(key))): _tame(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tame(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return str(value)
    return value


def short(value: object, digits: int = 4) -> Number:
    """Return a number with so many digits; None if it is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return int(value) if isinstance(value, bool) else None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def short_all(values: list[Number], digits: int = 4) -> list[Number]:
    """`short` of many numbers, in a tenth of the time: they are formatted and parsed again at once."""
    kinds = set(map(type, values))
    if kinds <= {int, type(None)}:
        return values
    if kinds <= {float, int, type(None)}:
        known = [math.nan if value is None else value for value in values] if None in values else values
        text = ",".join([f"%.{digits}g"] * len(known)) % tuple(known)
        if "inf" not in text:
            numbers: list[Number] = orjson.loads(f"[{text.replace('nan', 'null')}]")
            return numbers
    return [short(value, digits) for value in values]


def column(values: list[Number]) -> list[Number] | Number:
    """`values`, or the one value that all of them have."""
    return values[0] if values and values.count(values[0]) == len(values) else values


def _in_base64(num_bytes: int) -> int:
    return (num_bytes + 2) // 3 * 4
