"""Checks of a Hugging Face folder's weight files by their headers: milliseconds, before anything starts."""

import functools
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.files import plain_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Where Megatron-LM says which checkpoint of a folder is the newest.
TRACKER = "latest_checkpointed_iteration.txt"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header has it: its sizes, its dtype in safetensors' words (BF16, F8_E4M3, …), the file."""

    sizes: tuple[int, ...]
    dtype: str
    file: Path


def is_megatron_folder(folder: str | Path) -> bool:
    """Return whether the weights there are a checkpoint of Megatron-LM's (torch_dist), slime's or our own."""
    path = Path(folder)
    marks = (TRACKER, ".metadata", "trainer/.metadata")
    return any((path / mark).is_file() for mark in marks)


def weights_folder(path: str, flag: str = "--megatron-checkpoint") -> Path:
    """The folder with Megatron's files: `path` itself, `path`/trainer of a run's checkpoint, or what
    latest_checkpointed_iteration.txt in `path` names (iter_0000010 or release), as Megatron-LM and slime write it.

    Raises ValueError if no Megatron checkpoint is there, or one in another format.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no such folder")
    tracker = folder / TRACKER
    candidates = [folder, folder / "trainer"]
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not re.fullmatch(r"release|[0-9]{1,9}", latest):
            raise ValueError(f"{flag} {path}: {TRACKER} holds {latest[:40]!r}, no number and not release")
        candidates = [folder / (latest if latest == "release" else f"iter_{int(latest):07d}")]
    for candidate in candidates:
        if (candidate / ".metadata").is_file():
            _check_has_weights(candidate, flag)
            return candidate
    if any(list(candidate.glob("mp_rank_*")) for candidate in candidates):
        raise ValueError(
            f"{flag} {path}: it is in Megatron's older format (mp_rank_* folders); "
            "save it again with --ckpt-format torch_dist"
        )
    raise ValueError(f"{flag} {path}: it has no Megatron checkpoint (no .metadata, no {TRACKER})")


def _check_has_weights(folder: Path, flag: str) -> None:
    """Refuse a checkpoint of a run with adapters."""
    try:
        adapted = json.loads((folder / "fusionrl.json").read_text(encoding="utf-8")).get("adapted")
    except (OSError, ValueError, AttributeError, RecursionError):  # not of our own; who loads it finds the damage
        return
    if adapted:
        base = adapted.get("base") if isinstance(adapted, dict) else None
        raise ValueError(
            f"{flag} {folder}: it has adapters alone, of the base in {base}; merge them into it (fusionrl export"
            " --merge) and give the result as --hf-checkpoint"
        )


def check_weight_files(folder: str | Path, flag: str = "--hf-checkpoint") -> None:
    """Check that every .safetensors file that the folder needs is there and whole."""
    for path in _weight_files(Path(folder), flag):
        _header(path, flag)


def stored_tensors(folder: str | Path, flag: str = "--hf-checkpoint") -> dict[str, StoredTensor]:
    """Return the tensors of the folder by name, as a reader finds them: of a sharded one those that the index names."""
    paths = _weight_files(Path(folder), flag)
    single = [path for path in paths if path.name == SINGLE]
    files = _read_index(Path(folder), flag) or {name: path for path in single or paths for name in _header(path, flag)}
    found = {name: stored_tensor(path, name, flag) for name, path in files.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def tensors_of(path: Path, flag: str) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name; raises as `stored_tensor`."""
    tensors = {name: stored_tensor(path, name, flag) for name in _header(path, flag)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def stored_tensor(path: Path, name: str, flag: str = "--hf-checkpoint") -> StoredTensor | None:
    """Return one tensor of a file; None: the file lacks it, whatever the index says.

    Raises:
        OSError: the file is not there.
        ValueError: it is cut off or no safetensors, or the tensor's sizes are not numbers.
    """
    entry = _header(path, flag).get(name)
    if entry is None:
        return None
    sizes = entry.get("shape")
    if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
        raise ValueError(f"{flag} {path}: malformed safetensors header (shape {sizes!r} of {name})")
    return StoredTensor(tuple(sizes), str(entry.get("dtype")), path)


def tensor_files(folder: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Path]:
    """Return the file of each tensor. Those that an index names are not opened: a node may lack other stages' files."""
    single = Path(folder) / SINGLE
    if (index := _read_index(Path(folder), flag)) is not None:
        return index
    if not single.is_file():
        raise ValueError(
            f"{flag} {folder}: it has neither {SINGLE} nor {INDEX}; convert other formats with transformers'"
            " save_pretrained"
        )
    return dict.fromkeys(_header(single, flag), single)


def _read_index(folder: Path, flag: str) -> dict[str, Path] | None:
    """Return the file of each tensor by the folder's index; None without one."""
    if not (folder / INDEX).is_file():
        return None
    try:
        index = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(index.values()))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{flag} {folder}: {INDEX} is malformed ({error!r})") from error
    for name in names:
        if not plain_name(name, f"{flag} {folder}: {INDEX}").endswith(".safetensors"):
            raise ValueError(f"{flag} {folder}: {INDEX} names {name!r}; convert the weights to safetensors")
    return {name: folder / file for name, file in index.items()}


def _weight_files(folder: Path, flag: str) -> list[Path]:
    """Return the .safetensors files that the folder needs, which are there."""
    index = _read_index(folder, flag)
    paths = sorted(folder.glob("*.safetensors") if index is None else set(index.values()))
    if index is not None and (missing := [path.name for path in paths if not path.is_file()]):
        raise ValueError(f"{flag} {folder}: {INDEX} names files that are missing: {', '.join(missing[:5])}")
    if not paths:
        raise ValueError(f"{flag} {folder}: it has no .safetensors file; convert the weights to safetensors")
    return paths


def _header(path: Path, flag: str) -> dict[str, dict[str, object]]:
    """Return the entries of the file's tensors by name: dtype, shape, data_offsets. A file that stays is read once.

    The format: 8 bytes of header length (little endian), the header as JSON, then the tensors' bytes.
    """
    status = path.stat()
    return _read_header(path, flag, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=512)
def _read_header(path: Path, flag: str, size: int, _changed: int) -> dict[str, dict[str, object]]:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{flag} {path}: not a safetensors file, or cut off in its header")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = {name: entry["data_offsets"][1] for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"{flag} {path}: malformed safetensors header ({error!r})") from error
    if any(type(end) is not int or end < 0 for end in ends.values()):
        raise ValueError(f"{flag} {path}: malformed safetensors header (places of tensors that are not numbers)")
    expected = 8 + length + max(ends.values(), default=0)
    if size != expected:
        raise ValueError(
            f"{flag} {path}: the file has {size} bytes, its header describes {expected}; it is cut off or damaged, copy"
            " it again"
        )
    return entries
