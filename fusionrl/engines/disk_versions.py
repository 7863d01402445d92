"""Versions of the weights that trainers push by files: their deltas, and the engines' half of a push.

A delta is the change of a tensor's bit patterns since the last version, sorted into planes (all lowest bytes, then all
second ones, ...) and compressed by zstd:

xor        base ^ new of all elements, zero where nothing changed
overwrite  the changed elements' places, as gaps between them, and their new values; may be applied twice

`pull_version` verifies a version and brings it into this host's copy: <local folder>/weights is the Hugging Face folder
that engines load, `state` the name of the weights in it (absent while they change), and `lock` is held by the process
that works on it. Without a local folder engines load a full version from where the trainers wrote it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from safetensors import safe_open

from fusionrl.base.files import plain_name

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

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


_CHUNK = 16 * 1024**2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Change:
    """One tensor of a delta."""

    file: str
    num_changed: int  # elements
    checksum: str  # of the new tensor's bytes


@dataclass(frozen=True)
class Manifest:
    """The contents of a version's folder."""

    version: int
    state: str  # name of these very weights; another run's version of this number has another
    base: str | None  # state that a delta is against; None: the version is full
    encoding: Encoding
    checksum: str  # kind of all checksums
    files: dict[str, str]  # name -> checksum
    changes: dict[str, Change]  # tensor -> its change; those that did not change are left out

    @staticmethod
    def read(folder: str | Path) -> Manifest:
        """The manifest in `folder`; RuntimeError if there is none that can be read."""
        try:
            raw = json.loads(Path(folder, MANIFEST).read_text(encoding="utf-8"))
            changes = {name: Change(**change) for name, change in raw.pop("changes").items()}
            for name in raw["files"]:
                plain_name(name, MANIFEST)
            return Manifest(**raw, changes=changes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RuntimeError(
                f"{folder} is not a complete version of the weights ({error!r}); --update-weight-disk-dir must name one"
                " folder that the nodes of all trainers and engines see"
            ) from error


class DamagedVersion(RuntimeError):
    """A file of a version is not what the trainers wrote."""


def pull_version(folder: str, local_folder: str | None) -> str | None:
    """Verify the version in `folder` and bring this host's copy to it. Returns what engines load.

    None: the copy is not the version that a delta is against, or the delta is damaged; a full version is needed.
    RuntimeError names file and folder if the version is incomplete, a file of a full one is damaged, or the copy cannot
    be written. The copy is then as it was before, or counts as none.
    """
    manifest = Manifest.read(folder)
    if local_folder is None:
        assert manifest.base is None, "validated: deltas have a local folder"
        for name, checksum in manifest.files.items():
            _check_file(Path(folder, name), checksum, manifest.checksum)
        return folder
    local = Path(local_folder)
    try:
        local.mkdir(parents=True, exist_ok=True)
        with (local / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _state(local) != manifest.state and not _update(Path(folder), manifest, local):
                return None
    except OSError as error:
        raise RuntimeError(
            f"this host's copy of the weights in {local_folder} (--update-weight-local-checkpoint-dir) could not be"
            f" brought to version {manifest.version}: {error}"
        ) from error
    return str(local / "weights")


def _update(folder: Path, manifest: Manifest, local: Path) -> bool:
    """Bring the copy to the version; False: a full one is needed."""
    if manifest.base is None:
        (local / "state").unlink(missing_ok=True)
        shutil.rmtree(local / "weights", ignore_errors=True)
        (local / "weights").mkdir()
        for name, checksum in manifest.files.items():
            with (local / "weights" / name).open("wb") as copy:
                _check_file(folder / name, checksum, manifest.checksum, copy)
    elif _state(local) != manifest.base:
        logger.warning("%s is not the version that %s is against: a full one is needed", local, folder)
        return False
    else:
        try:
            for name, checksum in manifest.files.items():
                _check_file(folder / name, checksum, manifest.checksum)
            (local / "state").unlink()
            _apply(folder, manifest, local / "weights")
        except (DamagedVersion, ValueError, KeyError) as error:  # the last two also of a copy that was tampered with
            logger.warning("a full version is needed; %s cannot be applied to %s: %r", folder, local, error)
            return False
    (local / "state").write_text(manifest.state)
    return True


def _state(local: Path) -> str | None:
    path = local / "state"
    return path.read_text() if path.is_file() and (local / "weights").is_dir() else None


# ------------------------------------------------------------------------------------------------ files
def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:  # network storage may fail in the middle of a file, too
        raise DamagedVersion(f"{path} cannot be read ({error})") from error


def _check_file(path: Path, checksum: str, kind: str, copy: BinaryIO | None = None) -> None:
    """Verify a file as it is read; it is also written to `copy`."""
    actual = new_checksum(kind)
    for chunk in _chunks(path):
        actual.update(chunk)
        if copy is not None:
            copy.write(chunk)
    if actual.hexdigest() != checksum:
        raise DamagedVersion(f"{path} is damaged: its {kind} is {actual.hexdigest()}, not {checksum}")


def _apply(folder: Path, manifest: Manifest, target: Path) -> None:
    """Change the tensors of the copy where they are; DamagedDelta if one does not come out of these bytes."""
    places = _places(target)
    for file in manifest.files:
        with safe_open(folder / file, framework="numpy") as payloads:
            for name in payloads.keys():  # noqa: SIM118 (not iterable itself)
                change, words = manifest.changes[name], places[name]
                apply(words, payloads.get_tensor(name).tobytes(), manifest.encoding, change.num_changed)
                actual = checksum_of(words, manifest.checksum)
                if actual != change.checksum:
                    raise DamagedDelta(f"{name}: its {manifest.checksum} is {actual}, not {change.checksum}")


def _places(folder: Path) -> dict[str, np.ndarray]:
    """Tensor name -> its elements' bit patterns, [n], as they lie in the file."""
    places: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:  # layout: https://github.com/huggingface/safetensors#format
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r+", offset=8 + length)
        for name, facts in header.items():
            if name != "__metadata__":
                begin, end = facts["data_offsets"]
                count = int(np.prod(facts["shape"], dtype=np.int64))
                places[name] = data[begin:end].view(f"u{(end - begin) // max(count, 1) or 1}")
    return places
