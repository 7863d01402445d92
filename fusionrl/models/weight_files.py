"""Checks of a Hugging Face folder's weight files by their headers: milliseconds, before anything starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from fusionrl.base.file_hashes import plain_name

_MAX_HEADER_BYTES = 100_000_000


def check_weight_files(folder: str | Path, flag: str = "--hf-checkpoint") -> None:
    """Check that every .safetensors file that the folder needs is there and whole.

    Raises:
        ValueError: no weights, a shard of the index that is missing, or a file that is cut off or no safetensors.
    """
    for path in _weight_files(Path(folder), flag):
        _check_file(path, flag)


def tensor_names(folder: str | Path) -> set[str]:
    """Names of the tensors in the .safetensors files that the folder needs.

    Raises:
        ValueError: as `check_weight_files`.
    """
    return {name for path in _weight_files(Path(folder), "model") for name in _check_file(path, "model")}


def _weight_files(folder: Path, flag: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{flag} {folder}: {index.name} is malformed ({error!r})") from error
        for name in names:
            if not plain_name(name, f"{flag} {folder}: {index.name}").endswith(".safetensors"):
                raise ValueError(f"{flag} {folder}: {index.name} names {name!r}; convert the weights to safetensors")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{flag} {folder}: {index.name} names files that are missing: {', '.join(missing[:5])}")
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{flag} {folder}: it has no .safetensors file; convert the weights to safetensors")
    return paths


def _check_file(path: Path, flag: str) -> list[str]:
    """Names of the file's tensors.

    The format: 8 bytes of header length (little endian), the header as JSON, then the tensors' bytes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{flag} {path}: not a safetensors file, or cut off in its header")
        try:
            header = json.loads(file.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"{flag} {path}: malformed safetensors header ({error!r})") from error
    if any(type(end) is not int or end < 0 for end in ends.values()):
        raise ValueError(f"{flag} {path}: malformed safetensors header (places of tensors that are no numbers)")
    expected = 8 + length + max(ends.values(), default=0)
    if size != expected:
        raise ValueError(
            f"{flag} {path}: the file has {size} bytes, its header describes {expected}; it is cut off or damaged, copy"
            " it again"
        )
    return list(ends)
