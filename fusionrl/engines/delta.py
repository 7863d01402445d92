"""Encode the change of a tensor since the last version in few bytes, and apply it. Pure: arrays, zstd, hashes.

A tensor is seen as its elements' bit patterns, an array of unsigned integers. Two encodings:

xor        base ^ new of all elements, zero where nothing changed
overwrite  the changed elements' places, as gaps between them, and their new values; may be applied twice

The bytes of both are sorted into planes (all lowest bytes, then all second ones, ...) and compressed by zstd.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Encoding = Literal["xor", "overwrite"]
Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]

# Packages that must be there, by choice of --update-weight-delta-checksum and for any delta.
CHECKSUM_PACKAGES = {"xxh3-128": "xxhash", "blake3": "blake3"}
COMPRESSION_PACKAGE = "zstandard"

_LEVEL = 1  # bits of weights hardly compress: what counts are the zeros, and level 1 finds those
_GAP = np.dtype(np.uint32)


class DamagedDelta(ValueError):
    """Bytes that do not encode a change of a tensor of this size."""


def encode(base: Words, new: Words, encoding: Encoding) -> tuple[bytes, int]:
    """The change from `base` to `new`, both [n], and the number of elements in which they differ."""
    assert base.dtype == new.dtype and base.shape == new.shape and base.size <= np.iinfo(_GAP).max
    difference = np.bitwise_xor(base, new)
    if encoding == "xor":
        return _compress(_planes(difference)), int(np.count_nonzero(difference))
    places = np.flatnonzero(difference)
    gaps = np.diff(places, prepend=-1) - 1
    return _compress(_planes(gaps.astype(_GAP)) + _planes(new[places])), places.size


def apply(base: Words, payload: bytes, encoding: Encoding, num_changed: int) -> None:
    """Make `base` [n] what `encode` was given as `new`, in place; DamagedDelta if `payload` is damaged."""
    if encoding == "xor":
        base ^= _words(_decompress(payload, base.nbytes), base.dtype)
        return
    data = _decompress(payload, num_changed * (_GAP.itemsize + base.itemsize))
    split = num_changed * _GAP.itemsize
    places = np.cumsum(_words(data[:split], _GAP).astype(np.int64) + 1) - 1
    if num_changed and places[-1] >= base.size:
        raise DamagedDelta(f"element {places[-1]} of {base.size} is to change")
    base[places] = _words(data[split:], base.dtype)


def _planes(words: Words) -> bytes:
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _words(planes: bytes, dtype: np.dtype[np.unsignedinteger]) -> Words:
    matrix = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T
    return np.ascontiguousarray(matrix).reshape(-1).view(dtype)


def _compress(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompress(payload: bytes, num_bytes: int) -> bytes:
    import zstandard

    try:
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(num_bytes, 1))
    except zstandard.ZstdError as error:
        raise DamagedDelta(str(error)) from error
    if len(data) != num_bytes:
        raise DamagedDelta(f"{len(data)} bytes instead of {num_bytes}")
    return data


# ------------------------------------------------------------------------------------------------ checksums
class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: ReadableBuffer, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def new_checksum(kind: str) -> Any:
    """A fresh hash of --update-weight-delta-checksum `kind`, fed piece by piece as those of hashlib."""
    if kind == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    if kind == "blake3":
        import blake3

        return blake3.blake3()
    return _Adler32() if kind == "adler32" else hashlib.sha256()


def checksum_of(data: ReadableBuffer | np.ndarray, kind: str) -> str:
    """Hexadecimal checksum of a buffer of bytes (or of a contiguous array)."""
    checksum = new_checksum(kind)
    checksum.update(data.view(np.uint8).data if isinstance(data, np.ndarray) else data)
    return checksum.hexdigest()
