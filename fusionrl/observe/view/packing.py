"""Numbers and JSON made small: what the page carries, and how its script unpacks it again."""

from __future__ import annotations

import base64
import math
import zlib

import orjson

from fusionrl.observe import json_values

Number = float | int | None


class Packer:
    """Packs JSON text that is added piece by piece: deflate without a header, then base64.

    Base64 has no `<`, so no text of a model can end the element of the page that holds it.
    """

    def __init__(self) -> None:
        self._stream = zlib.compressobj(6, zlib.DEFLATED, -15)
        self._packed = bytearray()

    def add(self, text: bytes) -> None:
        self._packed += self._stream.compress(text)

    def size(self) -> int:
        """Bytes of base64 so far, all that was added counted."""
        self._packed += self._stream.flush(zlib.Z_SYNC_FLUSH)
        return (len(self._packed) + 2) // 3 * 4

    def text(self) -> str:
        """Return the whole in base64; nothing can be added after it."""
        return base64.b64encode(self._packed + self._stream.flush()).decode("ascii")


def pack(value: object) -> str:
    packer = Packer()
    packer.add(to_json(value))
    return packer.text()


def to_json(value: object) -> bytes:
    """`value` as JSON for the page's script; integers of more than 64 bits, which it would round, are texts."""
    try:
        return orjson.dumps(value, default=json_values.to_jsonable, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # half a surrogate pair, or an integer of more than 64 bits
        return json_values.to_json(_large_as_text(value))


def _large_as_text(value: object) -> object:
    if isinstance(value, dict):
        return {key: _large_as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_large_as_text(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) >= 2**63 else value


def short(value: object, digits: int = 4) -> Number:
    """Return a number with so many digits; None if it is not finite."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, int) else None
