"""Numbers and JSON made small: what the page carries, and how its script unpacks it again."""

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
