"""Numbers and JSON made small: what the page carries, and how its script unpacks it again."""

from __future__ import annotations

import base64
import math
import zlib

from fusionrl.observe.json_values import to_json

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


def short(value: object, digits: int = 4) -> Number:
    """Return a number with so many digits; None if it is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return int(value) if isinstance(value, bool) else None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")
